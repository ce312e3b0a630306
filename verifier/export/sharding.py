"""Which pieces of which checkpoint tensors one local Megatron tensor is made of: cutting, joining, tiling.

A placement is a list of boxes, each a range of rows (or columns) of one checkpoint tensor; laid end to end along
``dim`` they are the local tensor, bit for bit. So the same list cuts a shard out of the checkpoint, joins shards back
into the checkpoint, and proves that the shards of all owners tile every checkpoint tensor without hole or overlap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from verifier.errors import ContractError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Box:
    """Indices ``[begin, end)`` of one checkpoint tensor along the placement's dim, whole along the others."""

    source: str
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """One local parameter or buffer of one model chunk on one rank, and what it must hold."""

    param_name: str
    """Name in ``model_chunk.named_parameters()`` (or ``named_buffers()``): layers and experts numbered locally."""
    global_name: str
    """The same name with layers and experts numbered as in the checkpoint."""
    is_buffer: bool
    dim: int
    """Dim along which the boxes follow each other."""
    boxes: tuple[Box, ...]
    """In local order."""
    source_shapes: Mapping[str, tuple[int, ...]]
    """Checkpoint tensor -> its whole shape, for every tensor that a box names."""
    group: str
    """Equal for all placements, on any rank or chunk, that must hold the same bits."""
    replicated_over: tuple[str, ...]
    """Mesh axes along which the copies of a group lie; a tied output layer is besides a copy of the embedding."""

    @property
    def sources(self) -> tuple[str, ...]:
        """Checkpoint tensors that this one is made of, in the order of first use."""
        return tuple(dict.fromkeys(box.source for box in self.boxes))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the local tensor."""
        shape = list(self.source_shapes[self.boxes[0].source])
        shape[self.dim] = sum(box.end - box.begin for box in self.boxes)
        return tuple(shape)

    def shard(self, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """The exact bits that the local tensor must hold.

        Args:
            read: Checkpoint tensor by name, as `Checkpoint.read` gives it.

        Returns:
            Contiguous tensor of `shape`, in the dtype of its sources; it may share memory with what `read` gave.

        Raises:
            ContractError: a source's shape is not the one that the config implies, or sources differ in dtype.
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
        pieces = [whole[box.source].narrow(self.dim, box.begin, box.end - box.begin) for box in self.boxes]
        return pieces[0].contiguous() if len(pieces) == 1 else torch.cat(pieces, dim=self.dim)


def unshard(shards: Iterable[tuple[Placement, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Checkpoint tensors from the shards of all their owners, one of each group of replicas.

    Args:
        shards: Placement and the local tensor found there.

    Returns:
        Checkpoint tensor by name, in the shards' dtype and on the CPU.

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
        at = 0
        for box in placement.boxes:
            if box.source not in whole:
                whole[box.source] = torch.empty(placement.source_shapes[box.source], dtype=tensor.dtype)
            size = box.end - box.begin
            piece = tensor.detach().narrow(placement.dim, at, size)
            whole[box.source].narrow(placement.dim, box.begin, size).copy_(piece)
            at += size
    return whole


def tiling_error(placements: Iterable[Placement]) -> str | None:
    """Why these placements do not hold every index of every checkpoint tensor they name exactly once; None if so.

    Args:
        placements: One of each group of replicas.
    """
    boxes: dict[str, list[tuple[int, int]]] = {}
    length: dict[str, int] = {}
    dims: dict[str, set[int]] = {}
    for placement in placements:
        for box in placement.boxes:
            boxes.setdefault(box.source, []).append((box.begin, box.end))
            length[box.source] = placement.source_shapes[box.source][placement.dim]
            dims.setdefault(box.source, set()).add(placement.dim)
    for source, ranges in boxes.items():
        if len(dims[source]) != 1:
            return f"`{source}` is cut along dims {sorted(dims[source])} at once"
        at = 0
        for begin, end in sorted(ranges):
            if begin != at or end <= begin:
                kind = "hole" if begin > at else "overlap or empty box"
                return f"`{source}`: {kind} at index {min(at, begin)} (next box begins at {begin})"
            at = end
        if at != length[source]:
            return f"`{source}`: boxes cover {at:,} of {length[source]:,} indices"
    return None
