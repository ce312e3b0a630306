"""Rounding of a merge: exported matrices against base + alpha / rank * B A in float64."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from verifier.megatron.lora_megatron import LoraSpec
    from verifier.model.checkpoint import Checkpoint

_A, _B = ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeGap:
    """Distance of a merged matrix from the sum in float64."""

    dtype: str
    rank: int
    gap: float
    """Greatest distance, in roundings of the dtype at the magnitude of the sum's terms."""
    where: int
    """Element with the greatest distance, in the flattened matrix."""


def merge_gap(
    merged: torch.Tensor, base: torch.Tensor, inward: torch.Tensor, outward: torch.Tensor, scaling: float
) -> tuple[MergeGap, torch.Tensor, torch.Tensor]:
    """Distance from base + scaling * outward @ inward; the distance of each element, and the product, in float64."""
    import torch

    base, inward, outward = base.double(), inward.double(), outward.double()
    product = scaling * outward @ inward
    off = (merged.cpu().double() - (base + product)).abs()
    magnitude = base.abs() + scaling * outward.abs() @ inward.abs()
    steps = off / (magnitude * torch.finfo(merged.dtype).eps / 2).clamp(min=torch.finfo(torch.float64).tiny)
    where, dtype = int(steps.argmax()), str(merged.dtype).removeprefix("torch.")
    return MergeGap(dtype=dtype, rank=len(inward), gap=float(steps.view(-1)[where]), where=where), off, product


class MergeRounding:
    """Measurement over the matrices of one export.

    `adapter` has the live matrices by published name, on the host.
    """

    def __init__(self, base: Checkpoint, adapter: Mapping[str, torch.Tensor], lora: LoraSpec) -> None:
        self._base, self._adapter, self._lora = base, adapter, lora
        self._lost = self._added = 0.0

    def add(self, name: str, tensor: torch.Tensor) -> MergeGap | None:
        """Compare one exported tensor; None if it has no adapter."""
        linear = name.removesuffix(".weight")
        if linear + _A not in self._adapter:
            return None
        inward, outward = (self._adapter[linear + end] for end in (_A, _B))
        gap, off, product = merge_gap(tensor, self._base.read(name), inward, outward, self._lora.scaling)
        self._lost += float(off.square().sum())
        self._added += float(product.square().sum())
        return gap

    def share(self) -> float:
        """L2 norm of what rounding took or added, over that of the adapters' product; 0 for a product of zeros."""
        return math.sqrt(self._lost / self._added) if self._added else 0.0
