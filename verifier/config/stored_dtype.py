"""Dtype that a model is stored in, by its files alone, for runs that are not told one."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path

from verifier.config_json import quantization, stated_dtype

DEFAULT = "float32"
"""Dtype of a generated model, and of a config.json without weights that names none."""
_OF_WEIGHTS = {"F32": "float32", "BF16": "bfloat16"}
"""The safetensors format's name of a dtype -> torch's."""


def stored_dtype(model: str, known: Collection[str]) -> str:
    """Return the dtype that a local Hugging Face directory names, or of its weights; `DEFAULT` for a generated model.

    A quantized model is in bfloat16 once it is converted. A directory whose files cannot be read or name another dtype
    is refused later, by whoever opens its weights.

    Args:
        model: directory, its config.json, or name of a generated model.
        known: dtypes that a run can have.
    """
    found = None
    with contextlib.suppress(OSError, RecursionError, ValueError, AttributeError, KeyError, TypeError):
        path = Path(model)
        config = json.loads((path if path.is_file() else path / "config.json").read_text())
        found = stated_dtype(config) or ("bfloat16" if quantization(config) else None)
        if found is None and path.is_dir():
            found = _dtype_of_weights(path)
    return found if found is not None and found in known else DEFAULT


def _dtype_of_weights(folder: Path) -> str | None:
    """Dtype of most tensors of a directory's shards; None without any."""
    counts = Counter[str]()
    for shard in folder.glob("model*.safetensors"):
        with shard.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        counts.update(entry["dtype"] for name, entry in header.items() if name != "__metadata__")
    return _OF_WEIGHTS.get(counts.most_common(1)[0][0]) if counts else None
