"""Lookup of models by name: a generated checkpoint's id or a local directory."""

from __future__ import annotations

from pathlib import Path

from verifier.errors import UsageError
from verifier.model import tiny, wide


def resolve_model(model: str, cache: Path, dtype: str = "float32") -> Path:
    """Return the directory of a model; ``tiny:NAME`` and ``wide:NAME`` are generated under `cache`, in `dtype`.

    Raises:
        UsageError: no such generated model, no such directory, or a dtype that the generated model does not have.
    """
    if model.startswith(tiny.PREFIX):
        return tiny.write_tiny(model.removeprefix(tiny.PREFIX), cache, dtype)
    if model.startswith(wide.PREFIX):
        return wide.write_wide(model.removeprefix(wide.PREFIX), cache, dtype)
    path = Path(model)
    if not path.is_dir():
        tables = ((tiny.PREFIX, tiny.KNOWN), (wide.PREFIX, wide.WIDE))
        known = ", ".join(f"`{prefix}{name}`" for prefix, table in tables for name in table)
        raise UsageError(f"unknown model `{model}`: it is neither a local checkpoint directory nor one of {known}")
    return path


def is_generated(model: str) -> bool:
    """Return whether a name is that of a generated checkpoint, whose values are the same on every machine."""
    return model.startswith((tiny.PREFIX, wide.PREFIX))
