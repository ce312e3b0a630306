"""Content digest of a tensor's raw bytes, equal bit for bit on host and GPU.

Equal digests mean equal bytes in equal places. Shape and dtype do not enter; checks compare them separately. So a view,
a packed buffer and the tensor itself have one digest. It is fast rather than cryptographic: it finds mistakes, not
forgeries.

The digest "vd1" of `num_bytes` little-endian bytes:

1. Zero-pad to whole blocks of `ROWS` x `COLUMNS` 32-bit words, row by row. An empty tensor has no block.
2. A stream is one column of one block. For each of two lanes, with keys k, a stream's value is
   `sum over p of (word[2p] ^ k[2p]) * (word[2p + 1] ^ k[2p + 1])`, 32 x 32 -> 64 bits, mod 2^64.
3. A lane's sum is the sum over streams of `mix(value + (block * COLUMNS + column + 1) * GOLDEN)`, mod 2^64, where
   `mix` is the finaliser of splitmix64. Sums commute, so any order and any number of workers give the same bits.
4. Both sums and `num_bytes` are mixed into 128 bits.

The key of a row and the number mixed into a stream encode a word's place, so moved words, rows and blocks show.

Source:
    The product of keyed halves is that of NH (Black et al., "UMAC", 1999, section 4.2); the finaliser is that of
    Steele et al., "Fast splittable pseudorandom number generators", 2014, figure 17 (variant 13).
"""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from verifier.errors import ContractError

COLUMNS = 128
ROWS = 32
BLOCK_BYTES = 4 * ROWS * COLUMNS
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
_PREFIX = "vd1:"
_REFERENCE_BLOCKS = 256
"""Number of blocks (4 MiB of data) that the reference widens to 64 bits at a time."""


def mix(value: Any) -> Any:
    """Apply the finaliser of splitmix64 to an int below 2^64 or to an array of uint64, whose products wrap."""
    value = value ^ value >> 30
    value = value * MIX_1 & _MASK
    value = value ^ value >> 27
    value = value * MIX_2 & _MASK
    return value ^ value >> 31


KEYS = (mix(np.arange(1, 2 * ROWS + 1, dtype=np.uint64) * GOLDEN) >> 32).astype(np.uint32).reshape(2, ROWS)
"""Keys of the two lanes, one per row of a block."""


def finish(low: Any, high: Any, num_bytes: Any) -> tuple[Any, Any]:
    """Return the two words of the digest from both lanes' sums and the length, as ints or as arrays of uint64."""
    first = mix(low + mix(num_bytes + GOLDEN & _MASK) & _MASK)
    second = mix(high + first * MIX_1 & _MASK)
    return mix(first + second * MIX_2 & _MASK), second


def finish_all(sums: torch.Tensor, sizes: Sequence[int]) -> list[str]:
    """Return the digests of many pieces from both lanes' sums, int64 [num_pieces, 2] on the host, and their bytes."""
    low, high = sums.numpy().view(np.uint64).T
    words = np.stack(finish(low, high, np.asarray(sizes, dtype=np.uint64)), axis=1)
    text = words.astype(">u8").tobytes().hex()
    return [_PREFIX + text[at : at + 32] for at in range(0, len(text), 32)]


def lane_sums_numpy(data: torch.Tensor) -> tuple[int, int]:
    """Return both lanes' sums of a CPU uint8 vector [num_bytes]: the reference.

    It widens `_REFERENCE_BLOCKS` blocks at a time and so needs about 40 MiB of memory beside the data.
    """
    keys = KEYS.astype(np.uint64).reshape(2, ROWS // 2, 2, 1)
    sums = np.zeros(2, dtype=np.uint64)
    for first in range(0, -(-data.numel() // BLOCK_BYTES), _REFERENCE_BLOCKS):
        piece = data[first * BLOCK_BYTES : (first + _REFERENCE_BLOCKS) * BLOCK_BYTES].numpy()
        words = np.pad(piece, (0, -piece.size % BLOCK_BYTES)).view(np.uint32).astype(np.uint64)
        keyed = words.reshape(-1, 1, ROWS // 2, 2, COLUMNS) ^ keys
        streams = (keyed[..., 0, :] * keyed[..., 1, :]).sum(axis=2)
        number = np.arange(len(streams) * COLUMNS, dtype=np.uint64) + (first * COLUMNS + 1)
        sums += mix(streams + number.reshape(-1, 1, COLUMNS) * GOLDEN).sum(axis=(0, 2))
    low, high = sums.tolist()
    return low, high


def digest_tensor(tensor: torch.Tensor) -> str:
    """Return the digest of one tensor's bytes in row-major order, "vd1:" and 32 hex digits; see `digest_tensors`."""
    return digest_tensors([tensor])[0]


def digest_tensors(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Return the digests of many tensors, in order; a GPU takes one kernel and one copy for all of them.

    Args:
        tensors: strided, with storage; any dtype, any devices; a non-contiguous one is copied first.

    Raises:
        ContractError: a tensor has no bytes of its own (meta or sparse).
    """
    data = [raw_bytes(tensor) for tensor in tensors]
    found: dict[int, str] = {}
    for device in {item.device for item in data}:
        places = [place for place, item in enumerate(data) if item.device == device]
        found |= zip(places, _digests_of([data[place] for place in places]), strict=True)
    return [found[place] for place in range(len(data))]


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
    sizes = [item.numel() for item in data]
    if data[0].is_cuda and _installed("triton"):
        from verifier.plan.digest_triton import LINE_BYTES, lane_sums_of_pieces, table_of

        aligned = [item if item.data_ptr() % LINE_BYTES == 0 else item.clone() for item in data]
        begins = [item.data_ptr() - aligned[0].data_ptr() for item in aligned]
        table = table_of(begins, begins, sizes).to(aligned[0].device)
        return finish_all(lane_sums_of_pieces(aligned[0], table, len(sizes)).cpu(), sizes)
    lane_sums = lane_sums_numpy
    if _installed("numba"):
        from verifier.plan.digest_numba import lane_sums_numba

        lane_sums = lane_sums_numba
    elif torch.cuda.is_initialized() and _installed("triton") and all(sizes):
        # Without numba the GPU digests host memory some twenty times faster than the host does.
        return [digest for item in data for digest in _digests_of([item.cuda()])]
    words = [finish(*lane_sums(item.cpu()), size) for item, size in zip(data, sizes, strict=True)]
    return [f"{_PREFIX}{first:016x}{second:016x}" for first, second in words]


@functools.cache
def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


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
