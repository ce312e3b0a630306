"""Files of a checkpoint beside its weights and config.json: tokenizer, generation settings, code, licence."""

from __future__ import annotations

import shutil
from pathlib import Path

OTHER_WEIGHTS = frozenset({".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth"})
"""Suffixes of weights in other forms, which are those from before the training."""


def copy_files(source: Path, folder: Path) -> None:
    """Make the files beside a folder's weights and config.json those of a source, byte for byte.

    What was written anew, as by a tokenizer that was read and saved, is replaced or removed; weights of the source in
    other forms are left out, as are folders, such as those of a download's cache.
    """
    for file in beside_weights(folder):
        file.unlink()
    for file in beside_weights(source):
        if not holds_weights(file.name):
            shutil.copy(file, folder)


def beside_weights(folder: Path) -> list[Path]:
    """Files other than config.json, weights as safetensors and their index, which an export writes."""
    written = (".safetensors", ".safetensors.index.json")
    return [
        file for file in sorted(folder.iterdir())
        if file.is_file() and file.name != "config.json" and not file.name.endswith(written)
    ]  # fmt: skip


def holds_weights(name: str) -> bool:
    """Tell whether a file of this name has weights in another form."""
    return Path(name.removesuffix(".index.json")).suffix in OTHER_WEIGHTS
