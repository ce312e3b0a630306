"""Run by test_digest.py with TRITON_INTERPRET=1: the GPU kernel, interpreted, against the reference."""

import torch

from tests.reference_digest import lane_sums_numpy
from verifier.plan.digest_definition import BLOCK_BYTES
from verifier.plan.digest_triton import LINE_BYTES, STEP_BYTES, STEPS_PER_UNIT, _pieces_kernel, table_of

SIZES = [
    1, 3, 4, 513, BLOCK_BYTES + 2, STEP_BYTES - 1, STEP_BYTES, 0, STEP_BYTES + 1, STEPS_PER_UNIT * STEP_BYTES,
    STEPS_PER_UNIT * STEP_BYTES + 1, 16, 3 * STEP_BYTES + 1001,
]  # fmt: skip
GAP_BYTES = 32

begins, at = [], 0
for size in SIZES:
    begins.append(at)
    at += -(-size // LINE_BYTES) * LINE_BYTES + GAP_BYTES
storage = torch.randint(0, 256, (at + LINE_BYTES,), dtype=torch.uint8)
data = storage[-storage.data_ptr() % LINE_BYTES :]
targets, at = [0] * len(SIZES), 0  # the copy lies the other way round
for index in reversed(range(len(SIZES))):
    targets[index] = at
    at += -(-SIZES[index] // LINE_BYTES) * LINE_BYTES + GAP_BYTES

num_equal = 0
for copying in (False, True):
    copy = torch.full((at,), 7, dtype=torch.uint8)
    base = begins[5]  # inside: offsets may be negative
    table = table_of([begin - base for begin in begins], targets, SIZES)
    sums = torch.zeros(len(SIZES), 2, dtype=torch.int64)
    num_units = (table.numel() - 3 * len(SIZES)) // 2
    _pieces_kernel[(num_units,)](data[base:], copy, table, sums, len(SIZES), num_units, copying)
    for begin, target, size, found in zip(begins, targets, SIZES, sums.tolist(), strict=True):
        piece = data[begin : begin + size]
        expected = lane_sums_numpy(piece)
        assert tuple(value % 2**64 for value in found) == expected, (size, found, expected)
        padded = -(-size // LINE_BYTES) * LINE_BYTES
        assert (copy[target + padded : target + padded + GAP_BYTES] == 7).all()
        if copying:
            assert torch.equal(copy[target : target + size], piece)
            assert not copy[target + size : target + padded].any()
        num_equal += 1
    assert copying or (copy == 7).all()
print(f"{num_equal} cases equal")
