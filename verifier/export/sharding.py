"""Placement of checkpoint tensors in local Megatron tensors: cutting, joining and tiling.

A placement is a list of boxes, each a range of rows or columns of one checkpoint tensor. Concatenated along ``dim`` the
boxes are the local tensor, bit for bit. So one list cuts a shard out of the checkpoint, joins shards to the checkpoint,
and proves that the shards of all owners tile every checkpoint tensor without hole or overlap.

Rows that are written by hand need no more. A derived placement (`verifier.export.derived`) may also take one index of a
leading dim, where a checkpoint stacks its experts, transpose its sources, and scale or shift what it takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    index: int | None = None
    """Index in the source's leading dim, of which the box has no more; None where it has no such dim to itself."""

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
    transposed: bool = False
    """The last two dims of the sources are swapped; `dim` and the boxes count what that gives."""
    scale: float = 1.0
    """Factor of the sources' values; `offset` is added then."""
    offset: float = 0.0

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the checkpoint tensors in `boxes`, in the order of first use."""
        return tuple(dict.fromkeys(box.source for box in self.boxes))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        first = self.boxes[0]
        shape = list(self.source_shapes[first.source][first.index is not None :])
        if self.transposed:
            shape[-2:] = reversed(shape[-2:])
        shape[self.dim] = sum(box.size for box in self.boxes)
        return tuple(shape)

    def source_dim(self, box: Box) -> int:
        """Return the dim of the source along which a box is a range; a leading dim that it has one index of counts."""
        num_dims = len(self.source_shapes[box.source]) - (box.index is not None)
        swapped = {num_dims - 1: num_dims - 2, num_dims - 2: num_dims - 1} if self.transposed else {}
        return swapped.get(self.dim, self.dim) + (box.index is not None)

    def slice_of(self, box: Box, whole: torch.Tensor) -> torch.Tensor:
        """Return the view of a source that a box is, laid out as the local tensor is."""
        view = whole if box.index is None else whole[box.index]
        return (view.transpose(-1, -2) if self.transposed else view).narrow(self.dim, box.begin, box.size)

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
        pieces = [self.slice_of(box, whole[box.source]) for box in self.boxes]
        return self._done(pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim=self.dim))

    def _done(self, local: torch.Tensor) -> torch.Tensor:
        local = local if self.scale == 1.0 else local * self.scale
        return local if self.offset == 0.0 else local + self.offset

    def undone(self, local: torch.Tensor, *, gradients: bool) -> torch.Tensor:
        """Return a local tensor without scale and offset; of gradients, those by the source's values."""
        if gradients:
            return local if self.scale == 1.0 else local * self.scale
        local = local if self.offset == 0.0 else local - self.offset
        return local if self.scale == 1.0 else local / self.scale

    def loaded_again(self, local: torch.Tensor) -> torch.Tensor:
        """Return what a local tensor is once it was exported and loaded, which scale and offset round."""
        return self._done(self.undone(local, gradients=False))


def unshard(
    shards: Iterable[tuple[ParamPlacement, torch.Tensor]], *, gradients: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Join checkpoint tensors, with names, in the shards' dtype and on their device, from those of all owners.

    Each is handed out, and no longer held, when its last shard is copied; shards of one tensor go one after another.

    Args:
        shards: (placement, local tensor), one of each group of replicas.
        gradients: the tensors are gradients by the local values, and the result is by the checkpoint's.

    Raises:
        ContractError: a shard has another shape than its placement, or the shards do not tile a checkpoint tensor.
    """
    shards = sorted(shards, key=lambda item: item[0].sources)
    require_tiling(placement for placement, _ in shards)
    yield from joined_in_turn(shards, gradients=gradients)


def joined_in_turn(
    shards: Iterable[tuple[ParamPlacement, torch.Tensor]], *, gradients: bool = False
) -> Iterator[tuple[str, torch.Tensor]]:
    """Join shards in the order in which they come, as `unshard` does, of placements that tile every tensor.

    Raises:
        ContractError: a shard has another shape than its placement, or some shards of a tensor did not come.
    """
    whole: dict[str, torch.Tensor] = {}
    left: dict[str, int] = {}
    for placement, tensor in shards:
        if tuple(tensor.shape) != placement.shape:
            raise ContractError(
                f"`{placement.global_name}` ({placement.group}) has shape {list(tensor.shape)}, "
                f"its placement says {list(placement.shape)}"
            )
        values = placement.undone(tensor.detach(), gradients=gradients)
        pieces = values.split([box.size for box in placement.boxes], dim=placement.dim)
        for box, piece in zip(placement.boxes, pieces, strict=True):
            if box.source not in whole:
                whole[box.source] = tensor.new_empty(placement.source_shapes[box.source])
                left[box.source] = whole[box.source].numel()
            placement.slice_of(box, whole[box.source]).copy_(piece)
            left[box.source] -= piece.numel()
            if not left[box.source]:
                yield box.source, whole.pop(box.source)
    for name in whole:
        raise ContractError(f"`{name}`: {left[name]:,} of its {whole[name].numel():,} elements are on no rank")


def require_tiling(placements: Iterable[ParamPlacement]) -> None:
    """Refuse placements, one of each group of replicas, that do not hold every index of a tensor once.

    Raises:
        ContractError: names one such tensor.
    """
    for error in tiling_errors(placements).values():
        raise ContractError(error)


def tiling_errors(placements: Iterable[ParamPlacement]) -> dict[str, str]:
    """Return why placements, one of each group of replicas, do not hold every index of a tensor once, by its name."""
    held: dict[str, dict[int | None, list[tuple[int, int, int]]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for placement in placements:
        shapes |= placement.source_shapes
        for box in placement.boxes:
            range_of = (placement.source_dim(box), box.begin, box.end)
            held.setdefault(box.source, {}).setdefault(box.index, []).append(range_of)
    found = ((source, _uncovered(source, shapes[source], by_index)) for source, by_index in held.items())
    return {source: error for source, error in found if error is not None}


def _uncovered(
    source: str, shape: tuple[int, ...], held: Mapping[int | None, list[tuple[int, int, int]]]
) -> str | None:
    """Return why ranges (dim, begin, end), by the leading index that they are of, do not tile one tensor."""
    whole, leading = set(held) == {None}, {index for index in held if index is not None}
    if not whole and (None in held or leading != set(range(shape[0]))):
        absent = sorted(set(range(shape[0])) - leading)
        return f"`{source}`: leading indices {absent} are not held" if absent else f"`{source}` is held twice"
    for index, ranges in held.items():
        name = f"`{source}`" + ("" if index is None else f"[{index}]")
        dims = sorted({dim for dim, _, _ in ranges})
        if len(dims) != 1:
            return f"{name} is cut along dims {dims} at once"
        at = 0
        for _, begin, end in sorted(ranges):
            if begin != at or end <= begin:
                kind = "hole" if begin > at else "overlap or empty box"
                return f"{name}: {kind} at index {min(at, begin)} (next box begins at {begin})"
            at = end
        if at != shape[dims[0]]:
            return f"{name}: boxes cover {at:,} of {shape[dims[0]]:,} indices"
    return None


class Owners:
    """Owner of every element of every checkpoint tensor; of several copies the lowest rank."""

    def __init__(self, placements: Callable[[Mesh, int, int], list[ParamPlacement]], mesh: Mesh) -> None:
        self._boxes: dict[str, list[tuple[int, Box, int]]] = {}
        for rank, chunk in itertools.product(range(mesh.world_size), range(mesh.vpp)):
            for place in placements(mesh, rank, chunk):
                for box in place.boxes:
                    self._boxes.setdefault(box.source, []).append((place.source_dim(box), box, rank))

    def rank_of(self, name: str, index: Sequence[int]) -> int | None:
        """Rank that holds an element; None for a tensor that the layout does not have."""
        for dim, box, rank in self._boxes.get(name, ()):
            if index and box.index not in (None, index[0]):
                continue
            if not index or box.begin <= index[dim] < box.end:
                return rank
        return None
