"""Elements of gradients and sums of all of them, on whatever device they are; torch alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

TENSORS = 16
"""Tensors of a rank that an update adds up, at most."""
ELEMENTS = 256
"""Elements of each, at most."""
WHOLE = 2**24
"""Elements of a tensor all of which are summed too, at most."""
_PIECE = 2**22
"""Elements that are summed at once."""


def joined(parts: Sequence[torch.Tensor]) -> Any:
    """Tensors one after another, float32, on the host."""
    return torch.cat([torch.zeros(0), *(part.float().cpu() for part in parts)]).numpy()


def totals(tensor: torch.Tensor) -> torch.Tensor:
    """Sum of all elements, sum of their magnitudes, and 1, [3] float64, on the tensor's device."""
    rows = tensor.reshape(1) if tensor.ndim == 0 else tensor
    found = torch.tensor([0.0, 0.0, 1.0], dtype=torch.float64, device=tensor.device)
    for piece in rows.split(max(1, _PIECE // max(1, rows[:1].numel()))):
        values = piece.double()
        found[0] += values.sum()
        found[1] += values.abs_().sum()
    return found


def cut(tensor: torch.Tensor, begin: int, size: int) -> torch.Tensor:
    """Elements of the flattened tensor; no more rows than these lie in are copied."""
    if tensor.ndim < 2:
        return tensor.reshape(-1)[begin : begin + size]
    across = tensor[0].numel()
    first, end = begin // across, -(-(begin + size) // across)
    return tensor[first:end].reshape(-1)[begin - first * across :][:size]
