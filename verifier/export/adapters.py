"""Place of every published adapter matrix in Megatron, stated independently of Megatron-Bridge, as in `names`.

An adapter of a linear is two matrices: A [rank, in] reads the linear's input, B [out, rank] adds to its output.
Megatron has one pair on each of its linears, fused ones included. Published adapters have one pair for each checkpoint
matrix, so the parts of a fused linear share one A, and B is cut as the rows of the linear are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from verifier.export.names import PARAMS, Cut, ModelLayout, ParamRow
from verifier.export.sharding import ParamPlacement
from verifier.mesh import Mesh
from verifier.model.families import TensorRow

if TYPE_CHECKING:
    import torch

_A, _B = ".lora_A.weight", ".lora_B.weight"
"""Suffixes of the two matrices' names; they replace ``.weight`` of the checkpoint tensor."""
_RANK = "adapter rank"


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLayout:
    """Layout of a model's adapters; made by `adapters_of`."""

    layout: ModelLayout
    """Layout of the published adapters; the tensors of its family are their matrices."""
    rows: tuple[ParamRow, ...]
    """Megatron's adapter parameters."""
    shared: Mapping[str, tuple[str, ...]]
    """Pattern of the A named in a row -> patterns of all A that are the same matrix."""

    def placements(self, mesh: Mesh, rank: int, chunk: int = 0) -> list[ParamPlacement]:
        """List the adapter matrices of one model chunk of a rank; see `ModelLayout.placements`."""
        return self.layout.in_layers(self.rows, mesh, rank, chunk)

    def names(self) -> dict[str, list[str]]:
        """Map the name of each joined A to all of its published names: parts of a fused linear share one A."""
        return {
            first.format(layer=layer): [other.format(layer=layer) for other in others]
            for first, others in self.shared.items()
            for layer in range(self.layout.sizes["layers"])
        }

    def spread(self, joined: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every matrix under each of its published names."""
        names = self.names()
        for name, tensor in joined.items():
            for same in names.get(name, [name]):
                yield same, tensor


def adapters_of(layout: ModelLayout, targets: Sequence[str], rank: int) -> AdapterLayout:
    """Return the layout of adapters of this rank on Megatron's linears with these last names, such as "linear_qkv"."""
    dims = {tensor.pattern: tensor for tensor in layout.family.tensors}
    rows: list[ParamRow] = []
    tensors: list[TensorRow] = []
    shared: dict[str, tuple[str, ...]] = {}
    for row in PARAMS[layout.family.name]:
        base = row.pattern.removesuffix(".weight")
        if base == row.pattern or base.rpartition(".")[2] not in targets:
            continue
        inward, outward = (tuple(source.removesuffix(".weight") + end for source in row.sources) for end in (_A, _B))
        for source, to_rank, from_rank in zip(row.sources, inward, outward, strict=True):
            out_size, in_size = dims[source].dims
            tensors += [
                replace(dims[source], pattern=to_rank, dims=(_RANK, in_size)),
                replace(dims[source], pattern=from_rank, dims=(out_size, _RANK)),
            ]
        shared[inward[0]] = inward
        cut_in, cut_out = (Cut.COLUMNS, Cut.ROWS) if row.cut is Cut.COLUMNS else (Cut.ROWS, row.cut)
        rows += [
            replace(row, pattern=f"{base}.adapter.linear_in.weight", sources=inward[:1], cut=cut_in),
            replace(row, pattern=f"{base}.adapter.linear_out.weight", sources=outward, cut=cut_out),
        ]
    published = replace(
        layout, family=replace(layout.family, tensors=tuple(tensors)), sizes={**layout.sizes, _RANK: rank}
    )
    return AdapterLayout(layout=published, rows=tuple(rows), shared=shared)


def in_adapter(name: str) -> str | None:
    """Name of a live parameter of an adapter; None for one of the base."""
    return name if ".adapter." in name else None


def in_base(name: str) -> str | None:
    """Name that a live tensor of the frozen base has in a model without adapters; None for one of an adapter."""
    return None if ".adapter." in name else name.replace(".to_wrap.", ".")
