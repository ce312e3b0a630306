"""One rank's part of one checkpoint tensor, as an engine holds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """This rank's part of one checkpoint tensor, and where it was read."""

    name: str
    holder: str
    box: Box
    tensor: torch.Tensor
    quantized: bool = False
    """`tensor` is the whole rounded weight that holds this part."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A run of rows of a fused weight: whose rows of which checkpoint tensor."""

    name: str
    rows: int
    begin: int
