"""Content digest on a GPU: one pass over the data in 32-bit integer arithmetic, at the speed of memory.

One launch digests any number of pieces, such as the thousands of tensors of a transfer's chunk. A table on the device
lists the offset of each piece and the unit of work of each program. A warp takes one row of a block at a time (128
words, 16 bytes a thread) and holds one stream per word, so a word costs two XORs and one 32 x 32 + 64 -> 64 bit
multiply-add, and a stream of 32 words is mixed once. Programs add their sums to the piece's by 64-bit integer atomics:
addition commutes, so their order does not matter. On request the same pass copies what it reads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from verifier.plan.digest_definition import BLOCK_BYTES, COLUMNS, GOLDEN, KEYS, MIX_1, MIX_2, ROWS

BLOCKS_PER_STEP = 4
"""Number of blocks that a program digests at once, one per warp."""
STEP_BYTES = BLOCKS_PER_STEP * BLOCK_BYTES
STEPS_PER_UNIT = 4
"""Number of steps of one program (256 KiB). Two other programs on the same processor hide its start."""
LINE_BYTES = 16
"""Size of one read of a thread, in bytes; every piece begins at a multiple of it."""

_COLUMNS = tl.constexpr(COLUMNS)
_ROWS = tl.constexpr(ROWS)
_BLOCK_BYTES = tl.constexpr(BLOCK_BYTES)
_BLOCKS = tl.constexpr(BLOCKS_PER_STEP)
_STEP_BYTES = tl.constexpr(STEP_BYTES)
_STEPS = tl.constexpr(STEPS_PER_UNIT)
_LINE_BYTES = tl.constexpr(LINE_BYTES)
_AHEAD = tl.constexpr(8)
"""Number of rows that are loaded ahead of the row being digested."""
_GOLDEN, _MIX_1, _MIX_2 = tl.constexpr(GOLDEN), tl.constexpr(MIX_1), tl.constexpr(MIX_2)
_KEYS_0, _KEYS_1 = (tl.constexpr(tuple(lane)) for lane in KEYS.tolist())


@triton.jit
def _mix(value: tl.tensor) -> tl.tensor:
    value = value ^ (value >> 30)
    value = value * _MIX_1
    value = value ^ (value >> 27)
    value = value * _MIX_2
    return value ^ (value >> 31)


@triton.jit
def _keyed(words: tl.tensor, key: tl.constexpr) -> tl.tensor:
    """Return words [BLOCKS, COLUMNS] uint32 XOR the key, as uint64 below 2^32."""
    return (words ^ tl.full(words.shape, key, tl.uint32)).to(tl.uint64)


@triton.jit
def _step(
    data_ptr: tl.tensor,
    copy_ptr: tl.tensor,
    first_block: tl.tensor,
    num_bytes: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    whole: tl.constexpr,
    copy: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Add the streams of blocks [first_block, first_block + BLOCKS) to both lanes' sums [BLOCKS, COLUMNS]."""
    block = first_block + tl.arange(0, _BLOCKS)[:, None]
    column = tl.arange(0, _COLUMNS)[None, :]
    at = block * (_ROWS * _COLUMNS) + column
    stream_0 = tl.zeros([_BLOCKS, _COLUMNS], tl.uint64)
    stream_1 = tl.zeros([_BLOCKS, _COLUMNS], tl.uint64)
    ahead = ()
    for row in tl.static_range(_AHEAD):
        ahead += (_load(data_ptr, at + row * _COLUMNS, num_bytes, whole),)  # type: ignore[assignment]
    for row in tl.static_range(0, _ROWS, 2):
        first = ahead[0]  # type: ignore[misc]
        second = ahead[1]  # type: ignore[misc]
        ahead = ahead[2:]
        for later in tl.static_range(row + _AHEAD, row + _AHEAD + 2):  # issued before a store, which no load passes
            if later < _ROWS:
                ahead += (_load(data_ptr, at + later * _COLUMNS, num_bytes, whole),)  # type: ignore[assignment]
        if copy:
            _store(copy_ptr, at + row * _COLUMNS, first, num_bytes, whole)
            _store(copy_ptr, at + (row + 1) * _COLUMNS, second, num_bytes, whole)
        stream_0 += _keyed(first, _KEYS_0[row]) * _keyed(second, _KEYS_0[row + 1])
        stream_1 += _keyed(first, _KEYS_1[row]) * _keyed(second, _KEYS_1[row + 1])
    place = (block * _COLUMNS + column + 1).to(tl.uint64) * _GOLDEN
    mixed_0 = _mix(stream_0 + place)
    mixed_1 = _mix(stream_1 + place)
    if not whole:  # a block counts, zero padding included, if any of it is data
        begun = block * _BLOCK_BYTES + column * 0 < num_bytes
        mixed_0 = tl.where(begun, mixed_0, 0)
        mixed_1 = tl.where(begun, mixed_1, 0)
    return low + mixed_0, high + mixed_1


@triton.jit
def _load(data_ptr: tl.tensor, at: tl.tensor, num_bytes: tl.tensor, whole: tl.constexpr) -> tl.tensor:
    """Load the words with index `at` as uint32; zero beyond the end unless `whole`."""
    words_ptr = data_ptr.to(tl.pointer_type(tl.uint32))
    if whole:
        word = tl.load(words_ptr + at)
    else:
        last = num_bytes // 4
        word = tl.load(words_ptr + at, mask=at < last, other=0)
        cut = tl.full([], 0, tl.uint32)
        for part in tl.static_range(3):
            byte = tl.load(data_ptr + 4 * last + part, mask=4 * last + part < num_bytes, other=0)
            cut |= byte.to(tl.uint32) << 8 * part
        word = tl.where(at == last, cut, word)
    return word


@triton.jit
def _store(copy_ptr: tl.tensor, at: tl.tensor, word: tl.tensor, num_bytes: tl.tensor, whole: tl.constexpr) -> None:
    """Store the words with index `at` of the copy; its last line is padded with zeros."""
    words_ptr = copy_ptr.to(tl.pointer_type(tl.uint32))
    if whole:
        tl.store(words_ptr + at, word)
    else:
        tl.store(words_ptr + at, word, mask=at < tl.cdiv(num_bytes, _LINE_BYTES) * (_LINE_BYTES // 4))


@triton.jit(do_not_specialize=["num_pieces", "num_units"])
def _pieces_kernel(
    data_ptr: tl.tensor,
    copy_ptr: tl.tensor,
    table_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    num_pieces: tl.tensor,
    num_units: tl.tensor,
    copy: tl.constexpr,
) -> None:
    """Add both lanes' sums of every piece to sums_ptr (int64 [num_pieces, 2]); table_ptr points to a `table_of`."""
    unit = tl.program_id(0)
    units_ptr = table_ptr + 3 * num_pieces
    piece = tl.load(units_ptr + unit)
    first = tl.load(units_ptr + num_units + unit)
    num_bytes = tl.load(table_ptr + 2 * num_pieces + piece)
    data_ptr += tl.load(table_ptr + piece) * _LINE_BYTES
    if copy:
        copy_ptr += tl.load(table_ptr + num_pieces + piece) * _LINE_BYTES
    low = tl.zeros([_BLOCKS, _COLUMNS], tl.uint64)
    high = tl.zeros([_BLOCKS, _COLUMNS], tl.uint64)
    num_whole = num_bytes // _STEP_BYTES
    for step in range(first, tl.minimum(first + _STEPS, num_whole)):
        low, high = _step(data_ptr, copy_ptr, step * _BLOCKS, num_bytes, low, high, True, copy)
    if (num_whole < first + _STEPS) & (num_whole * _STEP_BYTES < num_bytes):
        low, high = _step(data_ptr, copy_ptr, num_whole * _BLOCKS, num_bytes, low, high, False, copy)
    sum_ptr = sums_ptr + 2 * piece
    tl.atomic_add(sum_ptr, tl.sum(tl.sum(low, 1), 0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sum_ptr + 1, tl.sum(tl.sum(high, 1), 0).to(tl.int64, bitcast=True), sem="relaxed")


def table_of(
    begins: Sequence[int] | np.ndarray, targets: Sequence[int], sizes: Sequence[int] | np.ndarray
) -> torch.Tensor:
    """Return the kernel's table on the host, int64 [3 * pieces + 2 * units].

    Args:
        begins: offset of each piece from the data's base, in bytes; a multiple of `LINE_BYTES`, possibly negative.
        targets: offset of each piece's copy from the copy's base, in bytes.
        sizes: size of each piece, in bytes; an empty one gets no unit.
    """
    num_bytes = np.asarray(sizes, dtype=np.int64)
    unit_bytes = STEPS_PER_UNIT * STEP_BYTES
    num_units = -(-num_bytes // unit_bytes)
    piece = np.repeat(np.arange(len(num_bytes)), num_units)
    number = np.arange(len(piece)) - np.repeat(np.cumsum(num_units) - num_units, num_units)
    lines = np.asarray([begins, targets], dtype=np.int64).reshape(-1) // LINE_BYTES
    return torch.from_numpy(np.concatenate([lines, num_bytes, piece, number * STEPS_PER_UNIT]))


def lane_sums_of_pieces(
    data: torch.Tensor, table: torch.Tensor, num_pieces: int, copy: torch.Tensor | None = None
) -> torch.Tensor:
    """Launch the kernel and return both lanes' sums of every piece, int64 [num_pieces, 2] on the GPU, unawaited.

    Args:
        data: uint8 vector; its first byte is the base of the table's begins, aligned to `LINE_BYTES`.
        table: table of the pieces, on the same GPU.
        num_pieces: number of pieces in the table.
        copy: uint8 vector, base of the table's targets; receives every piece, its last line padded with zeros.
    """
    sums = torch.zeros(num_pieces, 2, dtype=torch.int64, device=data.device)
    if num_units := (table.numel() - 3 * num_pieces) // 2:
        target = data if copy is None else copy
        with torch.cuda.device_of(data):
            _pieces_kernel[(num_units,)](
                data, target, table, sums, num_pieces, num_units, copy is not None, num_warps=4
            )  # fmt: skip
    return sums
