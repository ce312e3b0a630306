"""Content digest of a tensor's raw bytes, equal bit for bit on host and GPU.

Equal digests mean equal bytes in equal places. Shape and dtype do not enter; checks compare them separately. So a view,
a packed buffer and the tensor itself have one digest. It is fast rather than cryptographic: it finds mistakes, not
forgeries. `verifier.plan.digest_definition` defines it.
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from verifier.errors import ContractError
from verifier.plan.digest_definition import BLOCK_BYTES, COLUMNS, GOLDEN, KEYS, MASK, MIX_1, MIX_2, PREFIX, ROWS, finish

_REFERENCE_BLOCKS = 256
"""Number of blocks (4 MiB of data) that the reference widens to 64 bits at a time."""


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return the digest of one tensor's bytes in row-major order; dtype and shape do not enter.

    Args:
        tensor: any strided tensor with storage, any dtype, any device; a non-contiguous one is copied first.

    Returns:
        "vd1:" and 32 hex digits.

    Raises:
        ContractError: the tensor has no bytes of its own (meta or sparse).
    """
    return digest_tensors([tensor])[0]


def digest_tensors(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Return the digests of many tensors, in order; a GPU takes one kernel and one copy for all of them.

    Args:
        tensors: as for `digest_tensor`; may mix devices.

    Raises:
        ContractError: a tensor has no bytes of its own (meta or sparse).
    """
    data = [raw_bytes(tensor) for tensor in tensors]
    found: dict[int, str] = {}
    for device in {item.device for item in data}:
        places = [place for place, item in enumerate(data) if item.device == device]
        found |= zip(places, _digests_of([data[place] for place in places]), strict=True)
    return [found[place] for place in range(len(data))]


class Pieces:
    """Byte ranges of a buffer that is digested repeatedly, such as the tensors of a transfer's chunk.

    Args:
        begins: offset of each piece in the buffer, in bytes; multiples of 16.
        sizes: size of each piece, in bytes.
    """

    def __init__(self, begins: Sequence[int], sizes: Sequence[int]) -> None:
        self._begins, self._sizes = begins, sizes
        self._table: torch.Tensor | None = None

    def start(self, buffer: torch.Tensor) -> Digests:
        """Start to digest every piece; on a GPU this is queued on its current stream, and nothing waits for it.

        Args:
            buffer: uint8 vector; on a GPU its address is a multiple of 16 bytes.
        """
        if buffer.is_cuda and _installed("triton"):
            from verifier.plan.digest_triton import lane_sums_of_pieces, table_of

            if self._table is None or self._table.device != buffer.device:
                self._table = table_of(self._begins, self._begins, self._sizes).to(buffer.device)
            return Digests(lane_sums_of_pieces(buffer, self._table, len(self._sizes)), self._sizes)
        pieces = [buffer[begin : begin + size] for begin, size in zip(self._begins, self._sizes, strict=True)]
        return Digests(_digests_of(pieces))


class Digests:
    """Digests that a GPU may still be computing.

    Args:
        found: the digests; or both lanes' sums of each piece, int64 [num_pieces, 2] on a GPU.
        sizes: size of each piece, in bytes; needed for sums.
    """

    def __init__(self, found: list[str] | torch.Tensor, sizes: Sequence[int] = ()) -> None:
        self._sizes = sizes
        self._found = found
        if isinstance(found, torch.Tensor):
            self._found = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
            self._found.copy_(found, non_blocking=True)

    def result(self) -> list[str]:
        """Return one digest per piece; on a GPU, call it only after the stream that computes them has passed them."""
        return finish_all(self._found, self._sizes) if isinstance(self._found, torch.Tensor) else self._found


def finish_all(sums: torch.Tensor, sizes: Sequence[int]) -> list[str]:
    """Return the digests of many pieces, as `finish` does for one.

    Args:
        sums: both lanes' sums, int64 [num_pieces, 2] on the host.
        sizes: size of each piece, in bytes.
    """
    low, high = sums.numpy().view(np.uint64).T
    length = _mix_numpy(np.asarray(sizes, dtype=np.uint64) + np.uint64(GOLDEN))
    words = np.empty((len(low), 2), dtype=">u8")
    first = _mix_numpy(low + length)
    words[:, 1] = second = _mix_numpy(high + first * np.uint64(MIX_1))
    words[:, 0] = _mix_numpy(first + second * np.uint64(MIX_2))
    text = words.tobytes().hex()
    return [PREFIX + text[at : at + 32] for at in range(0, len(text), 32)]


def _mix_numpy(value: np.ndarray) -> np.ndarray:
    """Apply `mix` to uint64 arrays, whose sums and products wrap."""
    value = value ^ value >> np.uint64(30)
    value = value * np.uint64(MIX_1)
    value = value ^ value >> np.uint64(27)
    value = value * np.uint64(MIX_2)
    return value ^ value >> np.uint64(31)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's bytes as a contiguous uint8 vector [num_bytes] on its device; a view wherever possible.

    Raises:
        ContractError: the tensor has no bytes of its own (meta or sparse).
    """
    if tensor.layout is not torch.strided or tensor.device.type == "meta":
        what = "meta device" if tensor.device.type == "meta" else str(tensor.layout)
        raise ContractError(f"a tensor of shape {list(tensor.shape)} ({what}) has no bytes to digest")
    if tensor.is_complex() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def _digests_of(data: Sequence[torch.Tensor]) -> list[str]:
    """Return the digests of uint8 vectors of one device."""
    if data[0].is_cuda and _installed("triton"):
        from verifier.plan.digest_triton import LINE_BYTES, lane_sums_of_pieces, table_of

        aligned = [item if item.data_ptr() % LINE_BYTES == 0 else item.clone() for item in data]
        begins = [item.data_ptr() - aligned[0].data_ptr() for item in aligned]
        sizes = [item.numel() for item in aligned]
        table = table_of(begins, begins, sizes).to(aligned[0].device)
        return finish_all(lane_sums_of_pieces(aligned[0], table, len(sizes)).cpu(), sizes)
    lane_sums = lane_sums_torch
    if data[0].device.type == "cpu" and _installed("numba"):
        from verifier.plan.digest_numba import lane_sums_numba

        lane_sums = lane_sums_numba
    elif data[0].device.type == "cpu" and torch.cuda.is_initialized() and all(item.numel() for item in data):
        # Without numba the GPU digests host memory some twenty times faster than the host does.
        return [digest for item in data for digest in _digests_of([item.cuda()])]
    digests = []
    for item in data:
        low, high = lane_sums(item) if item.numel() else (0, 0)
        digests.append(finish(low & MASK, high & MASK, item.numel()))
    return digests


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def lane_sums_torch(data: torch.Tensor) -> tuple[int, int]:
    """Return both lanes' sums of a uint8 vector [num_bytes] by plain torch operations: the reference, for any device.

    It widens `_REFERENCE_BLOCKS` blocks at a time and so needs about 40 MiB of memory beside the data.
    """
    keys = torch.tensor(KEYS, dtype=torch.int64, device=data.device).view(2, ROWS // 2, 2, 1)
    column = torch.arange(1, COLUMNS + 1, device=data.device)
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    for begin in range(0, data.numel(), _REFERENCE_BLOCKS * BLOCK_BYTES):
        piece = data[begin : begin + _REFERENCE_BLOCKS * BLOCK_BYTES]
        num_blocks = -(-piece.numel() // BLOCK_BYTES)
        padded = torch.zeros(num_blocks * BLOCK_BYTES, dtype=torch.uint8, device=data.device)
        padded[: piece.numel()] = piece
        words = padded.view(torch.int32).to(torch.int64).bitwise_and_(0xFFFFFFFF)
        words = words.view(num_blocks, 1, ROWS // 2, 2, COLUMNS)
        keyed = words ^ keys
        streams = (keyed[..., 0, :] * keyed[..., 1, :]).sum(dim=2)
        block = torch.arange(begin // BLOCK_BYTES, begin // BLOCK_BYTES + num_blocks, device=data.device)
        number = (block.view(-1, 1) * COLUMNS + column).unsqueeze(1)
        sums += _mix_torch(streams + number * _signed(GOLDEN)).sum(dim=(0, 2))
    low, high = sums.tolist()
    return low, high


def _mix_torch(value: torch.Tensor) -> torch.Tensor:
    """Apply `mix` to int64 tensors, whose products wrap mod 2^64; a mask makes shifts logical."""
    value = value ^ (value >> 30 & (1 << 34) - 1)
    value = value * _signed(MIX_1)
    value = value ^ (value >> 27 & (1 << 37) - 1)
    value = value * _signed(MIX_2)
    return value ^ (value >> 31 & (1 << 33) - 1)


def _signed(value: int) -> int:
    """Return the int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value
