"""Tensors that torch divides among processes, `DTensor`: those of FSDP2, and of tensor parallelism by torch."""

from __future__ import annotations

from typing import Any


def is_sharded(value: Any) -> bool:
    """Tell whether a value is a DTensor."""
    return hasattr(value, "full_tensor")


def whole(value: Any) -> Any:
    """The whole of a DTensor, which every process of its mesh asks for at once; any other value as it is."""
    return value.detach().full_tensor() if is_sharded(value) else value


def local(value: Any) -> Any:
    """Part of a DTensor that this process holds, in the same memory; any other value as it is."""
    return value.detach().to_local() if is_sharded(value) else value
