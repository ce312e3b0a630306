"""Packing of tensors into a chunk's byte buffer and back, as the chunk plan lays them out; every dtype is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from verifier.errors import ContractError
from verifier.plan.chunk_plan import ALIGNMENT_BYTES, DTYPE_BYTES, Chunk
from verifier.plan.digest import Digests, digest_tensors, dtype_name, has_triton

_NAME_OF = {getattr(torch, name): name for name in DTYPE_BYTES}


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A chunk's buffer, filled or queued to be filled on the current stream of its GPU."""

    chunk: Chunk
    buffer: torch.Tensor
    """[chunk.num_bytes] uint8."""
    sums: Digests | None
    """Digests that the packing kernel computed while copying; None if torch packed."""

    def digests(self) -> list[str]:
        """Return the digests of the packed tensors in plan order; on a GPU, call it only after the packing is done."""
        if self.sums is not None:
            return self.sums.result()
        return digest_tensors(tensor for _, tensor in unpack(self.chunk, self.buffer))


def pack(chunk: Chunk, tensors: Mapping[str, torch.Tensor], into: torch.Tensor | None) -> Packed:
    """Copy the chunk's tensors to their places in one buffer; alignment gaps become zero.

    Every tensor is compared with the plan. Where all were as planned and lay row by row on the buffer's GPU, guards are
    made of them, by which torch tells in one call that the next ones are the same in all of this.

    Args:
        chunk: plan of the buffer.
        tensors: name -> tensor, exactly the chunk's names in plan order.
        into: [chunk.num_bytes] uint8 to fill; None allocates on the device of the first tensor.

    Raises:
        ContractError: a tensor is missing, not planned, or has another dtype or shape than planned.
    """
    sources = _in_order(chunk, tensors)
    if into is None:
        into = torch.empty(chunk.num_bytes, dtype=torch.uint8, device=sources[0].device)
    guards = chunk.guards.get(into.device) if _runs_kernel(into) else None
    if guards is not None and guards.check(*sources):
        return Packed(chunk=chunk, buffer=into, sums=_pack_on_gpu(chunk, sources, into))
    _compare(chunk, sources)
    if _runs_kernel(into) and set(map(torch.Tensor.get_device, sources)) == {into.get_device()}:
        if _row_by_row(sources):
            chunk.guards[into.device] = _guards_of(sources)
        else:
            sources = [item.detach().resolve_neg().contiguous() for item in sources]
        return Packed(chunk=chunk, buffer=into, sums=_pack_on_gpu(chunk, sources, into))
    for begin, size, after in zip(chunk.begins, chunk.sizes, (*chunk.begins[1:], chunk.num_bytes), strict=True):
        if begin + size < after:
            into[begin + size : after] = 0
    with torch.no_grad():
        torch._foreach_copy_([place for _, place in unpack(chunk, into)], sources)
    return Packed(chunk=chunk, buffer=into, sums=None)


def unpack(chunk: Chunk, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return (name, view) of the buffer's tensors in plan order; views keep the buffer alive.

    Args:
        chunk: plan of the buffer.
        buffer: [chunk.num_bytes] uint8.

    Raises:
        ContractError: the buffer has another size than planned.
    """
    if buffer.numel() != chunk.num_bytes:
        raise ContractError(f"chunk {chunk.index} has {buffer.numel()} bytes, the plan says {chunk.num_bytes}")
    wholes = {dtype: buffer.view(getattr(torch, dtype)) for dtype in dict.fromkeys(chunk.dtypes)}
    found = [buffer] * len(chunk.names)
    for places, dtype, shape, strides, first in chunk.runs:
        whole = wholes[dtype]
        view = whole.as_strided(shape, strides, whole.storage_offset() + first)
        for place, tensor in zip(places, view.unbind() if len(places) > 1 else (view,), strict=True):
            found[place] = tensor
    return list(zip(chunk.names, found, strict=True))


def _in_order(chunk: Chunk, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors in plan order, after comparing their names with the plan's."""
    if tuple(tensors) == chunk.names:
        return list(tensors.values())
    if extra := sorted(tensors.keys() - set(chunk.names)):
        raise ContractError(f"`{extra[0]}` was handed over for chunk {chunk.index}, which does not plan it")
    for name in chunk.names:
        if name not in tensors:
            raise ContractError(f"`{name}` is planned for chunk {chunk.index} and was not handed over")
    return [tensors[name] for name in chunk.names]


def _compare(chunk: Chunk, found: Sequence[torch.Tensor]) -> None:
    dtypes, shapes = [_NAME_OF.get(tensor.dtype) for tensor in found], [tensor.shape for tensor in found]
    if dtypes != list(chunk.dtypes) or shapes != list(chunk.shapes):
        for meta, tensor in zip(chunk.tensors, found, strict=True):
            if dtype_name(tensor.dtype) != meta.dtype or tensor.shape != meta.shape:
                raise ContractError(
                    f"`{meta.name}` is {dtype_name(tensor.dtype)} {list(tensor.shape)}, "
                    f"the chunk plan says {meta.dtype} {list(meta.shape)}"
                )


def _runs_kernel(into: torch.Tensor) -> bool:
    return into.is_cuda and has_triton()


def _row_by_row(sources: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.Tensor.is_contiguous, sources)) and not any(map(torch.Tensor.is_neg, sources))


def _guards_of(sources: Sequence[torch.Tensor]) -> Any:
    """Return guards of the tensors' types, dtypes, devices, shapes, strides and dispatch keys, negation among them."""
    from torch._C._dynamo.guards import TensorGuards

    shapes: list[Any] = [list(item.shape) for item in sources]
    strides: list[Any] = [list(item.stride()) for item in sources]
    return TensorGuards(*sources, dynamic_dims_sizes=shapes, dynamic_dims_strides=strides)


def _pack_on_gpu(chunk: Chunk, sources: Sequence[torch.Tensor], into: torch.Tensor) -> Digests:
    """Copy and digest all tensors of the chunk in one pass by one kernel."""
    data = list(sources)
    begins = np.fromiter(map(torch.Tensor.data_ptr, data), np.int64, len(data))
    for place in np.flatnonzero(begins % ALIGNMENT_BYTES).tolist():
        data[place] = data[place].detach().clone()
        begins[place] = data[place].data_ptr()
    base = data[0].detach().view(-1).view(torch.uint8)
    return chunk.pieces.copy(base, begins - base.data_ptr(), into)
