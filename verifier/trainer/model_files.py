"""Files of a checkpoint beside its weights and config.json: tokenizer, generation settings, code, licence."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path

from verifier.core.reader import digest_of
from verifier.core.record import Probe
from verifier.core.records_config import SavedFiles, SourceFiles

OTHER_WEIGHTS = frozenset({".bin", ".gguf", ".h5", ".msgpack", ".onnx", ".pt", ".pth"})
"""Suffixes of weights in other forms, which are those from before the training."""


def copy_files(source: Path, folder: Path) -> None:
    """Make the files beside a folder's weights and config.json those of a source, byte for byte.

    What was written anew, as by a tokenizer that was read and saved, is replaced or removed; weights of the source in
    other forms are left out, as are folders, such as those of a download's cache.
    """
    for file in _beside_weights(folder):
        file.unlink()
    for file in _beside_weights(source):
        if not _holds_weights(file.name):
            shutil.copy(file, folder)


def record_files(probe: Probe, source: Path, folder: Path, version: int) -> None:
    """Record the files beside the weights and config.json of a source, and of a folder that was exported to."""
    kept = [file for file in _beside_weights(source) if not _holds_weights(file.name)]
    probe.emit(SourceFiles(name="files", version=version, digests=_digests(kept)))
    probe.emit(SavedFiles(name="files", version=version, digests=_digests(_beside_weights(folder))))


def _beside_weights(folder: Path) -> list[Path]:
    """Files other than config.json, weights as safetensors and their index, which an export writes."""
    written = (".safetensors", ".safetensors.index.json")
    return [
        file for file in sorted(folder.iterdir())
        if file.is_file() and file.name != "config.json" and not file.name.endswith(written)
    ]  # fmt: skip


def _digests(files: Iterable[Path]) -> dict[str, str]:
    return {file.name: digest_of(file.read_bytes()) for file in files}


def _holds_weights(name: str) -> bool:
    return Path(name.removesuffix(".index.json")).suffix in OTHER_WEIGHTS
