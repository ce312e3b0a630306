"""Definition of the content digest, which kernels on host and GPU follow bit for bit.

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

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

COLUMNS = 128
ROWS = 32
BLOCK_BYTES = 4 * ROWS * COLUMNS
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
_MASK = (1 << 64) - 1
PREFIX = "vd1:"


def mix(value: Any) -> Any:
    """Apply the finaliser of splitmix64 to an int below 2^64 or to an array of uint64, whose products wrap."""
    value = value ^ value >> 30
    value = _wrapped(value * MIX_1)
    value = value ^ value >> 27
    value = _wrapped(value * MIX_2)
    return value ^ value >> 31


def _wrapped(value: Any) -> Any:
    return value & _MASK if isinstance(value, int) else value


KEYS = (mix(np.arange(1, 2 * ROWS + 1, dtype=np.uint64) * GOLDEN) >> 32).astype(np.uint32).reshape(2, ROWS)
"""Keys of the two lanes, one per row of a block."""


def finish(low: Any, high: Any, num_bytes: Any) -> tuple[Any, Any]:
    """Return the two words of the digest from both lanes' sums and the length, as ints or as arrays of uint64."""
    first = mix(_wrapped(low + mix(_wrapped(num_bytes + GOLDEN))))
    second = mix(_wrapped(high + first * MIX_1))
    return mix(_wrapped(first + second * MIX_2)), second


def finish_all(sums: torch.Tensor, sizes: Sequence[int] | np.ndarray) -> list[str]:
    """Return the digests of many pieces from both lanes' sums, int64 [num_pieces, 2] on the host, and their bytes."""
    words = np.empty(sums.shape, dtype=">u8")
    low, high = sums.numpy().view(np.uint64).T
    words[:, 0], words[:, 1] = finish(low, high, np.asarray(sizes, dtype=np.uint64))
    text = words.tobytes().hex(" ", 16)
    return (PREFIX + text.replace(" ", " " + PREFIX)).split(" ") if text else []
