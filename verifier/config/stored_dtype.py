"""Dtype that a model is stored in, by its config.json alone, for runs that are not told one."""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from pathlib import Path

import msgspec

DEFAULT = "float32"
"""Dtype of a generated model, and of a folder whose config.json names none."""


class _Text(msgspec.Struct):
    dtype: str | None = None
    torch_dtype: str | None = None


class _Config(_Text):
    text_config: _Text | None = None


def stored_dtype(model: str, known: Collection[str]) -> str:
    """Return the dtype that a local Hugging Face directory names; `DEFAULT` for a generated model.

    A directory whose config.json cannot be read or names another dtype is refused later, by whoever opens its weights.

    Args:
        model: directory, its config.json, or name of a generated model.
        known: dtypes that a run can have.
    """
    found = _Config()
    with contextlib.suppress(OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError, ValueError):
        file = Path(model) if Path(model).is_file() else Path(model) / "config.json"
        if file.is_file():
            found = msgspec.json.decode(file.read_bytes(), type=_Config)
    inner = found.text_config or _Text()
    named = (found.dtype, found.torch_dtype, inner.dtype, inner.torch_dtype)
    return next((dtype for dtype in named if dtype is not None and dtype in known), DEFAULT)
