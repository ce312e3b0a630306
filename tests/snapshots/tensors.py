"""The two tensors of the small run of `check_traces`, as its recorders saw them."""

from __future__ import annotations

from typing import Any

from verifier.core.record import TensorRecord

PLAN = "blake2:" + "01" * 16
"""Digest of the plan that every party holds."""
SHAPES = {"a": (4, 2), "b": (3,)}


def digest(name: str, version: int) -> str:
    """Another digest for each (tensor, version)."""
    return "vd1:" + name * 4 + f"{version:02d}" + "0123456789abcdef" * 2


def tensor(kind: type[TensorRecord], name: str, version: int = 0, rank: int = 0, **more: Any) -> TensorRecord:
    """One tensor as somebody saw it."""
    facts: Any = {"digest": digest(name, version), "dtype": "float32", "shape": SHAPES[name], **more}
    return kind(name=name, version=version, rank=rank, **facts)
