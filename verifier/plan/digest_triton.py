"""The digest on a GPU: one pass over the data, 32-bit integer arithmetic, as fast as memory is read.

A warp takes one row of a block at a time (128 words, 16 bytes a thread) and holds one stream per word, so a word costs
two XORs and one 32 x 32 + 64 -> 64 bit multiply-add, and a stream of 32 words is mixed once. Programs add their sums to
the result by 64-bit integer atomics: addition commutes, so the bits do not depend on their order.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl

from verifier.plan.digest import BLOCK_BYTES, COLUMNS, GOLDEN, KEYS, MIX_1, MIX_2, ROWS

BLOCKS_PER_STEP = 4
"""Blocks that a program reads at once: one per warp."""
_PROGRAMS_PER_PROCESSOR = 8

_COLUMNS = tl.constexpr(COLUMNS)
_ROWS = tl.constexpr(ROWS)
_BLOCK_BYTES = tl.constexpr(BLOCK_BYTES)
_BLOCKS = tl.constexpr(BLOCKS_PER_STEP)
_GOLDEN = tl.constexpr(GOLDEN)
_MIX_1 = tl.constexpr(MIX_1)
_MIX_2 = tl.constexpr(MIX_2)
_KEYS_0 = tl.constexpr(KEYS[0])
_KEYS_1 = tl.constexpr(KEYS[1])


@triton.jit
def _mix(value: tl.tensor) -> tl.tensor:
    value = value ^ (value >> 30)
    value = value * _MIX_1
    value = value ^ (value >> 27)
    value = value * _MIX_2
    return value ^ (value >> 31)


@triton.jit
def _keyed(words: tl.tensor, key: tl.constexpr) -> tl.tensor:
    """Words [BLOCKS, COLUMNS] uint32, keyed, as uint64 below 2^32."""
    return (words ^ tl.full(words.shape, key, tl.uint32)).to(tl.uint64)


@triton.jit
def _step(
    data_ptr: tl.tensor,
    first_block: tl.tensor,
    num_bytes: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    whole: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Add the streams of blocks [first_block, first_block + BLOCKS) to both lanes' sums [BLOCKS, COLUMNS]."""
    block = first_block + tl.arange(0, _BLOCKS)[:, None]
    column = tl.arange(0, _COLUMNS)[None, :]
    at = block * (_ROWS * _COLUMNS) + column
    stream_0 = tl.zeros([_BLOCKS, _COLUMNS], tl.uint64)
    stream_1 = tl.zeros([_BLOCKS, _COLUMNS], tl.uint64)
    for pair in tl.static_range(_ROWS // 2):
        first = _load(data_ptr, at + 2 * pair * _COLUMNS, num_bytes, whole)
        second = _load(data_ptr, at + (2 * pair + 1) * _COLUMNS, num_bytes, whole)
        stream_0 += _keyed(first, _KEYS_0[2 * pair]) * _keyed(second, _KEYS_0[2 * pair + 1])
        stream_1 += _keyed(first, _KEYS_1[2 * pair]) * _keyed(second, _KEYS_1[2 * pair + 1])
    place = (block * _COLUMNS + column + 1).to(tl.uint64) * _GOLDEN
    mixed_0 = _mix(stream_0 + place)
    mixed_1 = _mix(stream_1 + place)
    if not whole:  # a block that has begun counts to its last zero; one that has not is no part of the data
        begun = block * _BLOCK_BYTES + column * 0 < num_bytes
        mixed_0 = tl.where(begun, mixed_0, 0)
        mixed_1 = tl.where(begun, mixed_1, 0)
    return low + mixed_0, high + mixed_1


@triton.jit
def _load(data_ptr: tl.tensor, at: tl.tensor, num_bytes: tl.tensor, whole: tl.constexpr) -> tl.tensor:
    """Words number `at` as uint32; unless they are whole, zero beyond the end."""
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


@triton.jit(do_not_specialize=["num_bytes"])
def _lane_sums_kernel(data_ptr: tl.tensor, sums_ptr: tl.tensor, num_bytes: tl.tensor) -> None:
    """Add both lanes' sums of num_bytes bytes at data_ptr (uint8) to sums_ptr (int64 [2])."""
    low = tl.zeros([_BLOCKS, _COLUMNS], tl.uint64)
    high = tl.zeros([_BLOCKS, _COLUMNS], tl.uint64)
    num_bytes = num_bytes.to(tl.int64)
    num_whole = num_bytes // (_BLOCKS * _BLOCK_BYTES)
    program = tl.program_id(0).to(tl.int64)
    num_programs = tl.num_programs(0).to(tl.int64)
    for step in range(program, num_whole, num_programs):
        low, high = _step(data_ptr, step * _BLOCKS, num_bytes, low, high, True)
    if num_whole * (_BLOCKS * _BLOCK_BYTES) < num_bytes and num_whole % num_programs == program:
        low, high = _step(data_ptr, num_whole * _BLOCKS, num_bytes, low, high, False)
    tl.atomic_add(sums_ptr, tl.sum(tl.sum(low, 1), 0).to(tl.int64, bitcast=True), sem="relaxed")
    tl.atomic_add(sums_ptr + 1, tl.sum(tl.sum(high, 1), 0).to(tl.int64, bitcast=True), sem="relaxed")


def lane_sums_triton(data: torch.Tensor) -> torch.Tensor:
    """Both lanes' sums of a uint8 vector [num_bytes] on a GPU, as int64 [2] on it; does not wait for the kernel.

    A vector that does not start at a multiple of 4 bytes is copied first.
    """
    if data.data_ptr() % 4:
        data = data.clone()
    sums = torch.zeros(2, dtype=torch.int64, device=data.device)
    num_steps = triton.cdiv(data.numel(), BLOCKS_PER_STEP * BLOCK_BYTES)
    with torch.cuda.device_of(data):
        _lane_sums_kernel[(min(num_steps, max_programs(data.device)),)](data, sums, data.numel(), num_warps=4)
    return sums


@functools.cache
def max_programs(device: torch.device) -> int:
    """Programs that keep a device's memory busy."""
    return _PROGRAMS_PER_PROCESSOR * torch.cuda.get_device_properties(device).multi_processor_count
