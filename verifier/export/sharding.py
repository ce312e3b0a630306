"""Placement of checkpoint tensors in local Megatron tensors: cutting, joining and tiling.

A placement is a list of boxes, each a range of rows or columns of one checkpoint tensor. Concatenated along ``dim`` the
boxes are the local tensor, bit for bit. So one list cuts a shard out of the checkpoint, joins shards to the checkpoint,
and proves that the shards of all owners tile every checkpoint tensor without hole or overlap.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verifier.errors import ContractError
from verifier.mesh import Mesh

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Box:
    """Indices ``[begin, end)`` of one checkpoint tensor along the placement's dim; all indices along the others."""

    source: str
    begin: int
    end: int

    @property
    def size(self) -> int:
        """Number of indices."""
        return self.end - self.begin


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamPlacement:
    """One local parameter or buffer of one model chunk on one rank, and the contents that it must have."""

    param_name: str
    """Name in ``model_chunk.named_parameters()`` or ``named_buffers()``, with local layer and expert numbers."""
    global_name: str
    """The same name with the checkpoint's layer and expert numbers."""
    is_buffer: bool
    dim: int
    """Dim along which the boxes are concatenated."""
    boxes: tuple[Box, ...]
    """Boxes in local order."""
    source_shapes: Mapping[str, tuple[int, ...]]
    """Name of each checkpoint tensor in `boxes` -> its whole shape."""
    group: str
    """Label shared by all placements, on any rank or chunk, that must hold the same bits."""
    replicated_over: tuple[str, ...]
    """Mesh axes along which copies of a group lie; a tied output layer is a further copy of the embedding."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the checkpoint tensors in `boxes`, in the order of first use."""
        return tuple(dict.fromkeys(box.source for box in self.boxes))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        shape = list(self.source_shapes[self.boxes[0].source])
        shape[self.dim] = sum(box.size for box in self.boxes)
        return tuple(shape)

    def shard(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Return the exact contents that the local tensor must have, contiguous, in the dtype of its sources.

        Args:
            read: returns a checkpoint tensor by name, such as `Checkpoint.read`; the result may share its memory.

        Raises:
            ContractError: a source has another shape than the config implies, or sources differ in dtype.
        """
        import torch

        whole = {name: read(name) for name in self.sources}
        for name, tensor in whole.items():
            if tuple(tensor.shape) != self.source_shapes[name]:
                raise ContractError(
                    f"`{name}` has shape {list(tensor.shape)} where the config implies {list(self.source_shapes[name])}"
                )
        if len({tensor.dtype for tensor in whole.values()}) != 1:
            dtypes = ", ".join(f"`{name}` {tensor.dtype}" for name, tensor in whole.items())
            raise ContractError(f"`{self.global_name}` is made of tensors of unequal dtype: {dtypes}")
        pieces = [whole[box.source].narrow(self.dim, box.begin, box.size) for box in self.boxes]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)


def unshard(shards: Iterable[tuple[ParamPlacement, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Join checkpoint tensors, by name, in the shards' dtype and on the CPU, from the shards of all their owners.

    Args:
        shards: (placement, local tensor), one of each group of replicas.

    Raises:
        ContractError: a shard has another shape than its placement, or the shards do not tile a checkpoint tensor.
    """
    import torch

    shards = list(shards)
    error = tiling_error([placement for placement, _ in shards])
    if error is not None:
        raise ContractError(error)
    whole: dict[str, torch.Tensor] = {}
    for placement, tensor in shards:
        if tuple(tensor.shape) != placement.shape:
            raise ContractError(
                f"`{placement.global_name}` ({placement.group}) has shape {list(tensor.shape)}, "
                f"its placement says {list(placement.shape)}"
            )
        pieces = tensor.detach().split([box.size for box in placement.boxes], dim=placement.dim)
        for box, piece in zip(placement.boxes, pieces, strict=True):
            if box.source not in whole:
                whole[box.source] = torch.empty(placement.source_shapes[box.source], dtype=tensor.dtype)
            whole[box.source].narrow(placement.dim, box.begin, box.size).copy_(piece)
    return whole


def tiling_error(placements: Iterable[ParamPlacement]) -> str | None:
    """Return why placements, one of each group of replicas, do not hold every index of their tensors exactly once."""
    held: dict[str, list[tuple[int, int, int]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for placement in placements:
        shapes |= placement.source_shapes
        for box in placement.boxes:
            held.setdefault(box.source, []).append((placement.dim, box.begin, box.end))
    for source, boxes in held.items():
        dims = sorted({dim for dim, _, _ in boxes})
        if len(dims) != 1:
            return f"`{source}` is cut along dims {dims} at once"
        at = 0
        for _, begin, end in sorted(boxes):
            if begin != at or end <= begin:
                kind = "hole" if begin > at else "overlap or empty box"
                return f"`{source}`: {kind} at index {min(at, begin)} (next box begins at {begin})"
            at = end
        if at != shapes[source][dims[0]]:
            return f"`{source}`: boxes cover {at:,} of {shapes[source][dims[0]]:,} indices"
    return None


class Owners:
    """Owner of every element of every checkpoint tensor; of several copies the lowest rank.

    Args:
        placements: placements of a model or an adapter, by mesh, rank and virtual chunk, as those of a layout.
        mesh: parallel sizes.
    """

    def __init__(self, placements: Callable[[Mesh, int, int], list[ParamPlacement]], mesh: Mesh) -> None:
        self._boxes: dict[str, list[tuple[int, Box, int]]] = {}
        for rank, chunk in itertools.product(range(mesh.world_size), range(mesh.vpp)):
            for place in placements(mesh, rank, chunk):
                for box in place.boxes:
                    self._boxes.setdefault(box.source, []).append((place.dim, box, rank))

    def rank_of(self, name: str, index: Sequence[int]) -> int | None:
        """Rank that holds an element; None for a tensor that the layout does not have."""
        for dim, box, rank in self._boxes.get(name, ()):
            if not index or box.begin <= index[dim] < box.end:
                return rank
        return None
