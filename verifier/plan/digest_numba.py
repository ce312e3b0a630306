"""Content digest on a CPU: one thread, without the interpreter's lock, at the speed of memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numba
import numpy as np

from verifier.plan.digest_definition import BLOCK_BYTES, COLUMNS, GOLDEN, KEYS, MIX_1, MIX_2, ROWS

if TYPE_CHECKING:
    import torch

_GOLDEN, _MIX_1, _MIX_2 = np.uint64(GOLDEN), np.uint64(MIX_1), np.uint64(MIX_2)
_WORDS_PER_LINE = 16
_WORDS_AHEAD = 1024
"""Distance, in words, at which one word of each cache line is read ahead (7 to 11 GB/s)."""


def lane_sums_numba(data: torch.Tensor | np.ndarray) -> tuple[int, int]:
    """Return both lanes' sums of a uint8 vector [num_bytes] on the host."""
    array = np.asarray(data)
    whole = array.size // BLOCK_BYTES
    low = high = 0
    if whole:
        low, high, _ = _block_sums(array[: whole * BLOCK_BYTES].view(np.uint32), np.uint64(0), KEYS)
    rest = array[whole * BLOCK_BYTES :]
    if rest.size:
        padded = np.zeros(BLOCK_BYTES, dtype=np.uint8)
        padded[: rest.size] = rest
        tail_low, tail_high, _ = _block_sums(padded.view(np.uint32), np.uint64(whole), KEYS)
        low, high = low + tail_low, high + tail_high
    return low, high


def _compiled(function: Callable[..., Any]) -> Any:
    """Compile on the first call; keep the machine code on disk where numba finds a place for it."""
    try:
        return numba.njit(nogil=True, cache=True)(function)
    except RuntimeError:  # numba: "cannot cache function: no locator available", a read-only installation
        return numba.njit(nogil=True)(function)


@numba.njit(inline="always")
def _mix(value: np.uint64) -> np.uint64:
    value = value ^ (value >> np.uint64(30))
    value = value * _MIX_1
    value = value ^ (value >> np.uint64(27))
    value = value * _MIX_2
    return value ^ (value >> np.uint64(31))


@_compiled
def _block_sums(words: np.ndarray, first_block: np.uint64, keys: np.ndarray) -> tuple[np.uint64, np.uint64, np.uint32]:
    """Return both lanes' sums of whole blocks, words uint32 [num_blocks * ROWS * COLUMNS], and the words read ahead."""
    low = np.uint64(0)
    high = np.uint64(0)
    touched = np.uint32(0)
    last_pair = words.size - 2 * COLUMNS
    streams_0 = np.empty(COLUMNS, np.uint64)
    streams_1 = np.empty(COLUMNS, np.uint64)
    for block in range(words.size // (ROWS * COLUMNS)):
        streams_0[:] = np.uint64(0)
        streams_1[:] = np.uint64(0)
        for pair in range(ROWS // 2):
            at = (block * ROWS + 2 * pair) * COLUMNS
            ahead = min(at + _WORDS_AHEAD, last_pair)
            for line in range(2 * COLUMNS // _WORDS_PER_LINE):
                touched |= words[ahead + line * _WORDS_PER_LINE]
            first = words[at : at + COLUMNS]
            second = words[at + COLUMNS : at + 2 * COLUMNS]
            key_00, key_01 = keys[0, 2 * pair], keys[0, 2 * pair + 1]
            key_10, key_11 = keys[1, 2 * pair], keys[1, 2 * pair + 1]
            for column in range(COLUMNS):
                streams_0[column] += np.uint64(first[column] ^ key_00) * np.uint64(second[column] ^ key_01)
                streams_1[column] += np.uint64(first[column] ^ key_10) * np.uint64(second[column] ^ key_11)
        number = (first_block + np.uint64(block)) * np.uint64(COLUMNS) + np.uint64(1)
        for column in range(COLUMNS):
            place = (number + np.uint64(column)) * _GOLDEN
            low += _mix(streams_0[column] + place)
            high += _mix(streams_1[column] + place)
    return low, high, touched
