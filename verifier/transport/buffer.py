"""Tensors into a chunk's byte buffer and back, as the chunk plan lays them out; dtypes are kept tensor by tensor."""

from __future__ import annotations

import functools
import importlib.util
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from verifier.errors import ContractError
from verifier.plan.chunk_plan import ALIGNMENT_BYTES, Chunk
from verifier.plan.digest import Digests, Pieces, digest_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Packed:
    """A chunk's buffer, filled, or about to be by the current stream of its GPU."""

    chunk: Chunk
    buffer: torch.Tensor
    """[chunk.num_bytes] uint8."""
    sums: Digests | None
    """What the packing kernel digested as it copied; None where something else packed."""

    def digests(self) -> list[str]:
        """Of what was packed, in the plan's order; on a GPU only once its stream has come past the packing."""
        if self.sums is not None:
            return self.sums.result()
        return digest_tensors(tensor for _, tensor in unpack(self.chunk, self.buffer))


def pack(chunk: Chunk, tensors: Mapping[str, torch.Tensor], into: torch.Tensor | None) -> Packed:
    """Copy the chunk's tensors to their places in one buffer; the alignment gaps are zero.

    Args:
        chunk: the plan for this buffer.
        tensors: by name; exactly the chunk's names.
        into: [chunk.num_bytes] uint8 to fill; None for fresh memory where the tensors are.

    Raises:
        ContractError: a tensor is absent, superfluous, or has another dtype or shape than planned.
    """
    sources = _planned(chunk, tensors)
    if into is None:
        into = torch.empty(chunk.num_bytes, dtype=torch.uint8, device=sources[0].device)
    if into.is_cuda and all(source.device == into.device for source in sources) and _has_triton():
        return Packed(chunk=chunk, buffer=into, sums=_pack_on_gpu(chunk, sources, into))
    ends = [entry.begin + entry.tensor.num_bytes for entry in chunk.entries]
    for end, begin in zip(ends, [*(entry.begin for entry in chunk.entries[1:]), chunk.num_bytes], strict=True):
        if end < begin:
            into[end:begin] = 0
    with torch.no_grad():
        torch._foreach_copy_([place for _, place in unpack(chunk, into)], sources)
    return Packed(chunk=chunk, buffer=into, sums=None)


def unpack(chunk: Chunk, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Views of the buffer's tensors, in the plan's order; they keep the buffer alive.

    Args:
        chunk: the plan for this buffer.
        buffer: [chunk.num_bytes] uint8.

    Raises:
        ContractError: the buffer has another size than planned.
    """
    if buffer.numel() != chunk.num_bytes:
        raise ContractError(f"chunk {chunk.index} has {buffer.numel()} bytes, the plan says {chunk.num_bytes}")
    found = []
    of_dtype: dict[str, torch.Tensor] = {}
    for entry in chunk.entries:
        meta = entry.tensor
        if meta.dtype not in of_dtype:
            of_dtype[meta.dtype] = buffer.view(getattr(torch, meta.dtype))
        whole = of_dtype[meta.dtype]
        begin = whole.storage_offset() + entry.begin // whole.element_size()
        view = whole.as_strided(meta.shape, _row_by_row(meta.shape), begin)
        found.append((meta.name, view))
    return found


@functools.cache
def _row_by_row(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor, in elements."""
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def pieces_of(chunk: Chunk) -> Pieces:
    """The chunk's tensors as ranges of its buffer."""
    return Pieces([entry.begin for entry in chunk.entries], [entry.tensor.num_bytes for entry in chunk.entries])


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _planned(chunk: Chunk, tensors: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in the plan's order, each as planned."""
    planned = {entry.tensor.name for entry in chunk.entries}
    if extra := sorted(tensors.keys() - planned):
        raise ContractError(f"`{extra[0]}` was handed over for chunk {chunk.index}, which does not plan it")
    found = []
    for entry in chunk.entries:
        meta = entry.tensor
        if meta.name not in tensors:
            raise ContractError(f"`{meta.name}` is planned for chunk {chunk.index} and was not handed over")
        tensor = tensors[meta.name]
        if tensor.dtype is not getattr(torch, meta.dtype) or tensor.shape != meta.shape:
            raise ContractError(
                f"`{meta.name}` is {dtype_name(tensor.dtype)} {list(tensor.shape)}, "
                f"the chunk plan says {meta.dtype} {list(meta.shape)}"
            )
        found.append(tensor)
    return found


def _pack_on_gpu(chunk: Chunk, sources: Sequence[torch.Tensor], into: torch.Tensor) -> Digests:
    """Copy and digest in one pass, by one kernel over all tensors of the chunk."""
    from verifier.plan.digest_triton import lane_sums_of_pieces, table_of

    data = [_laid_out(source) for source in sources]
    base = data[0].detach().view(-1).view(torch.uint8)
    begins = [item.data_ptr() - base.data_ptr() for item in data]
    sizes = [entry.tensor.num_bytes for entry in chunk.entries]
    table = table_of(begins, [entry.begin for entry in chunk.entries], sizes).pin_memory()
    table = table.to(into.device, non_blocking=True)
    return Digests(lane_sums_of_pieces(base, table, len(sizes), copy=into), sizes)


def _laid_out(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy, that lies row by row in memory and begins at a multiple of the alignment."""
    if not tensor.is_contiguous() or tensor.is_neg():
        tensor = tensor.detach().resolve_neg().contiguous()
    return tensor if tensor.data_ptr() % ALIGNMENT_BYTES == 0 else tensor.detach().clone()


@functools.cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None
