"""Tensors into a chunk's byte buffer and back, as the chunk plan lays them out; dtypes are kept tensor by tensor."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from verifier.errors import ContractError
from verifier.plan.chunk_plan import Chunk, TensorMeta


def pack(chunk: Chunk, tensors: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Copy the chunk's tensors to their places in one fresh buffer on their device; the alignment gaps are zero.

    Args:
        chunk: the plan for this buffer.
        tensors: by name; exactly the chunk's names.

    Returns:
        [chunk.num_bytes] uint8.

    Raises:
        ContractError: a tensor is absent, superfluous, or has another dtype or shape than planned.
    """
    planned = {entry.tensor.name for entry in chunk.entries}
    if extra := sorted(tensors.keys() - planned):
        raise ContractError(f"`{extra[0]}` was handed over for chunk {chunk.index}, which does not plan it")
    device = next((tensor.device for tensor in tensors.values()), None)
    buffer = torch.empty(chunk.num_bytes, dtype=torch.uint8, device=device)
    ends = [entry.begin + entry.tensor.num_bytes for entry in chunk.entries]
    for end, begin in zip(ends, [*(entry.begin for entry in chunk.entries[1:]), chunk.num_bytes], strict=True):
        buffer[end:begin] = 0
    for entry in chunk.entries:
        meta = entry.tensor
        if meta.name not in tensors:
            raise ContractError(f"`{meta.name}` is planned for chunk {chunk.index} and was not handed over")
        tensor = tensors[meta.name].detach()
        if (dtype_name(tensor.dtype), tuple(tensor.shape)) != (meta.dtype, meta.shape):
            raise ContractError(
                f"`{meta.name}` is {dtype_name(tensor.dtype)} {list(tensor.shape)}, "
                f"the chunk plan says {meta.dtype} {list(meta.shape)}"
            )
        _place(buffer, entry.begin, meta).copy_(tensor)
    return buffer


def unpack(chunk: Chunk, buffer: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Views of the buffer's tensors, in the plan's order.

    The views keep the buffer alive: a loader may hold them until its whole layer has come, so no buffer is refilled.

    Args:
        chunk: the plan for this buffer.
        buffer: [chunk.num_bytes] uint8.

    Raises:
        ContractError: the buffer has another size than planned.
    """
    if buffer.numel() != chunk.num_bytes:
        raise ContractError(f"chunk {chunk.index} has {buffer.numel()} bytes, the plan says {chunk.num_bytes}")
    return [(entry.tensor.name, _place(buffer, entry.begin, entry.tensor)) for entry in chunk.entries]


def dtype_name(dtype: torch.dtype) -> str:
    """``torch.bfloat16`` -> "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def _place(buffer: torch.Tensor, begin: int, meta: TensorMeta) -> torch.Tensor:
    return buffer[begin : begin + meta.num_bytes].view(getattr(torch, meta.dtype)).view(meta.shape)
