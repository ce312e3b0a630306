"""Content digest of a tensor's raw bytes, equal bit for bit on host and GPU.

The digest answers "are these the same bytes in the same places". Shape and dtype are no part of it (they are compared
on their own), so that a view, a packed buffer and the tensor itself agree. It is fast rather than cryptographic: it
finds mistakes, not forgeries.

Definition ("vd1"), for `num_bytes` little-endian bytes:

1. Zero-pad to whole blocks of `ROWS` x `COLUMNS` 32-bit words, row by row. An empty tensor has no block.
2. A stream is one column of one block. For each of two lanes, with keys k, a stream's value is
   `sum over p of (word[2p] ^ k[2p]) * (word[2p + 1] ^ k[2p + 1])`, 32 x 32 -> 64 bits, mod 2^64.
3. A lane's sum is the sum over streams of `mix(value + (block * COLUMNS + column + 1) * GOLDEN)`, mod 2^64, where
   `mix` is the finaliser of splitmix64. Sums commute, so any order and any number of workers give the same bits.
4. Both sums and `num_bytes` are mixed into 128 bits.

A word's place is its row (by its key) and its stream (by the number mixed in), so moved words, rows and blocks show.

Source:
    The product of keyed halves is that of NH (Black et al., "UMAC", 1999, section 4.2); the finaliser is that of
    Steele et al., "Fast splittable pseudorandom number generators", 2014, figure 17 (variant 13).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from verifier.errors import ContractError

PREFIX = "vd1:"
COLUMNS = 128
ROWS = 32
BLOCK_BYTES = 4 * ROWS * COLUMNS
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_REFERENCE_BLOCKS = 256
"""Blocks (4 MiB of data) that the reference widens to 64 bits at a time."""


def mix(value: int) -> int:
    """Splitmix64's finaliser: a bijection of 64 bits in which every input bit moves every output bit."""
    value ^= value >> 30
    value = value * MIX_1 & _MASK
    value ^= value >> 27
    value = value * MIX_2 & _MASK
    return value ^ value >> 31


def _lane_keys(lane: int) -> tuple[int, ...]:
    """One 32-bit key per row of a block."""
    return tuple(mix((lane * ROWS + row + 1) * GOLDEN & _MASK) >> 32 for row in range(ROWS))


KEYS: tuple[tuple[int, ...], tuple[int, ...]] = (_lane_keys(0), _lane_keys(1))
"""Keys of the two lanes, per row of a block."""


def digest_tensor(tensor: torch.Tensor) -> str:
    """Digest of one tensor's bytes in row-major order; dtype and shape do not enter.

    Args:
        tensor: any strided tensor with storage, any dtype, any device; a non-contiguous one is copied first.

    Returns:
        "vd1:" and 32 hex digits.

    Raises:
        ContractError: the tensor has no bytes of its own (meta or sparse).
    """
    return digest_tensors([tensor])[0]


def digest_tensors(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Digests of many tensors, in order; on a GPU one kernel takes them all, and one copy brings their sums back.

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
    """Byte ranges of a buffer that is digested again and again, such as the tensors of a transfer's chunk.

    Args:
        begins: of each piece, in bytes from the buffer's start; multiples of 16.
        sizes: of each piece, in bytes.
    """

    def __init__(self, begins: Sequence[int], sizes: Sequence[int]) -> None:
        self._begins, self._sizes = begins, sizes
        self._table: torch.Tensor | None = None

    def start(self, buffer: torch.Tensor) -> Digests:
        """Digest every piece; on a GPU this is work for its current stream, and nothing waits for it.

        Args:
            buffer: uint8 vector; on a GPU it begins at a multiple of 16 bytes.
        """
        if buffer.is_cuda and _installed("triton"):
            from verifier.plan.digest_triton import lane_sums_of_pieces, table_of

            if self._table is None or self._table.device != buffer.device:
                self._table = table_of(self._begins, self._begins, self._sizes).to(buffer.device)
            return Digests(lane_sums_of_pieces(buffer, self._table, len(self._sizes)), self._sizes)
        pieces = [buffer[begin : begin + size] for begin, size in zip(self._begins, self._sizes, strict=True)]
        return Digests(_digests_of(pieces))


class Digests:
    """Digests that a GPU may still be working on.

    Args:
        found: the digests, or both lanes' sums of each piece on a GPU, int64 [num_pieces, 2].
        sizes: of each piece, in bytes.
    """

    def __init__(self, found: list[str] | torch.Tensor, sizes: Sequence[int] = ()) -> None:
        self._sizes = sizes
        self._found = found
        if isinstance(found, torch.Tensor):
            self._found = torch.empty(found.shape, dtype=found.dtype, device="cpu", pin_memory=True)
            self._found.copy_(found, non_blocking=True)

    def result(self) -> list[str]:
        """In the pieces' order; on a GPU only once the stream that they were started on has come past them."""
        return finish_all(self._found, self._sizes) if isinstance(self._found, torch.Tensor) else self._found


def finish(low: int, high: int, num_bytes: int) -> str:
    """The digest's text from both lanes' sums (unsigned 64 bits each) and the length in bytes."""
    first = mix(low + mix(num_bytes + GOLDEN & _MASK) & _MASK)
    second = mix(high + first * MIX_1 & _MASK)
    first = mix(first + second * MIX_2 & _MASK)
    return f"{PREFIX}{first:016x}{second:016x}"


def finish_all(sums: torch.Tensor, sizes: Sequence[int]) -> list[str]:
    """`finish` for many at once.

    Args:
        sums: both lanes' sums, int64 [num_pieces, 2] on the host.
        sizes: in bytes.
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
    """`mix` on uint64 arrays, whose sums and products wrap."""
    value = value ^ value >> np.uint64(30)
    value = value * np.uint64(MIX_1)
    value = value ^ value >> np.uint64(27)
    value = value * np.uint64(MIX_2)
    return value ^ value >> np.uint64(31)


def raw_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes as a contiguous uint8 vector [num_bytes] on its own device; a view wherever possible.

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
    """Digests of uint8 vectors of one device."""
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
        # A rank on a machine without numba: its GPU digests what lies on the host, some twenty times faster.
        return [digest for item in data for digest in _digests_of([item.cuda()])]
    digests = []
    for item in data:
        low, high = lane_sums(item) if item.numel() else (0, 0)
        digests.append(finish(low & _MASK, high & _MASK, item.numel()))
    return digests


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def lane_sums_torch(data: torch.Tensor) -> tuple[int, int]:
    """The reference: both lanes' sums of a uint8 vector [num_bytes] by plain torch operations, on any device.

    Widened in pieces of `_REFERENCE_BLOCKS` blocks, so it needs about ten times 4 MiB of memory beside the data.
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
    """`mix` on int64 tensors, whose products wrap mod 2^64; shifts are made logical by a mask."""
    value = value ^ (value >> 30 & (1 << 34) - 1)
    value = value * _signed(MIX_1)
    value = value ^ (value >> 27 & (1 << 37) - 1)
    value = value * _signed(MIX_2)
    return value ^ (value >> 31 & (1 << 33) - 1)


def _signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    return value - (1 << 64) if value >> 63 else value
