"""Definition of the content digest: its constants and its arithmetic in Python integers. Torch-free.

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

PREFIX = "vd1:"
COLUMNS = 128
ROWS = 32
BLOCK_BYTES = 4 * ROWS * COLUMNS
GOLDEN = 0x9E3779B97F4A7C15
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK = (1 << 64) - 1


def mix(value: int) -> int:
    """Apply the finaliser of splitmix64, a bijection of 64 bits in which every input bit moves every output bit."""
    value ^= value >> 30
    value = value * MIX_1 & MASK
    value ^= value >> 27
    value = value * MIX_2 & MASK
    return value ^ value >> 31


def _lane_keys(lane: int) -> tuple[int, ...]:
    """Return one 32-bit key per row of a block."""
    return tuple(mix((lane * ROWS + row + 1) * GOLDEN & MASK) >> 32 for row in range(ROWS))


KEYS: tuple[tuple[int, ...], tuple[int, ...]] = (_lane_keys(0), _lane_keys(1))
"""32-bit keys of the two lanes, one per row of a block."""


def finish(low: int, high: int, num_bytes: int) -> str:
    """Return the digest's text from both lanes' sums (unsigned, 64 bits each) and the length in bytes."""
    first = mix(low + mix(num_bytes + GOLDEN & MASK) & MASK)
    second = mix(high + first * MIX_1 & MASK)
    first = mix(first + second * MIX_2 & MASK)
    return f"{PREFIX}{first:016x}{second:016x}"
