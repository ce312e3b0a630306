"""Elements of gradients and sums of all of them, on whatever device they are; torch alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch

from verifier.stages.train.records import GradientSums, SummedTensor

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


@dataclass(slots=True, kw_only=True)
class Part:
    """Elements of one tensor's gradient on a rank: what backward passes give, and what the optimizer is given."""

    name: str
    group: str
    """Label of the ranks that hold the same bits; there are `copies` of them."""
    copies: int
    numel: int
    """Elements of the tensor."""
    begin: int
    size: int
    added: torch.Tensor
    """Sum of what passes gave, in the type that gradients are added up in."""
    whole: torch.Tensor | None
    """Totals of what passes gave; None where all elements are not summed."""
    used: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """Weights that the passes used."""
    owned_begin: int = 0
    owned: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    """Elements that the optimizer is given, and the place of the first among the part's."""
    owned_size: int = 0
    owned_totals: torch.Tensor = field(default_factory=lambda: torch.zeros(3, dtype=torch.float64))

    def add(self, gradient: torch.Tensor) -> None:
        """Add what a backward pass gives."""
        with torch.no_grad():
            self.added.add_(cut(gradient, self.begin, self.size))
            if self.whole is not None:
                self.whole.add_(totals(gradient))

    def own(self, given: torch.Tensor, offset: int = 0) -> None:
        """Take what the optimizer is given, from an index in the flattened tensor on."""
        begin = max(self.begin - offset, 0)
        self.owned = cut(given, begin, max(self.begin + self.size - offset - begin, 0)).clone()
        self.owned_begin = max(offset - self.begin, 0) if len(self.owned) else 0
        if self.whole is not None:
            self.owned_size, self.owned_totals = given.numel(), totals(given)


def sums_record(parts: Sequence[Part], **fields: Any) -> tuple[GradientSums, dict[str, Any]]:
    """Record of the parts of an update, with its other fields, and its arrays."""
    tensors = tuple(
        SummedTensor(
            name=part.name, group=part.group, copies=part.copies, begin=part.begin, elements=part.size,
            owned_begin=part.owned_begin, owned=len(part.owned),
            dtype=cast('Literal["float32", "bfloat16"]', str(part.added.dtype).removeprefix("torch.")),
            size=0 if part.whole is None else part.numel, owned_size=part.owned_size,
        )
        for part in parts
    )  # fmt: skip
    whole = [
        torch.zeros(4) if part.whole is None else torch.cat([part.whole.cpu(), part.owned_totals[:1].cpu()])
        for part in parts
    ]
    arrays = {"added": [part.added for part in parts], "reduced": [part.owned for part in parts]}
    arrays["used"] = [part.used for part in parts]
    table = torch.stack([row.double() for row in whole]) if whole else torch.zeros(0, 4, dtype=torch.float64)
    told = {**{key: joined(values) for key, values in arrays.items()}, "whole": table.numpy()}
    return GradientSums(tensors=tensors, **fields), told
