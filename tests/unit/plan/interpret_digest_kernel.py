"""Run by test_digest.py with TRITON_INTERPRET=1: the GPU kernel, interpreted, against the reference."""

import torch

from verifier.plan.digest import BLOCK_BYTES, lane_sums_torch
from verifier.plan.digest_triton import BLOCKS_PER_STEP, _lane_sums_kernel

STEP_BYTES = BLOCKS_PER_STEP * BLOCK_BYTES
SIZES = [1, 3, 4, 513, BLOCK_BYTES + 2, STEP_BYTES - 1, STEP_BYTES, STEP_BYTES + 1, 3 * STEP_BYTES + 1001]

num_equal = 0
for num_bytes in SIZES:
    for num_programs in (1, 2, 3):
        data = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8)
        sums = torch.zeros(2, dtype=torch.int64)
        _lane_sums_kernel[(num_programs,)](data, sums, num_bytes)
        expected = lane_sums_torch(data)
        assert tuple(sums.tolist()) == expected, (num_bytes, num_programs, sums.tolist(), expected)
        num_equal += 1
print(f"{num_equal} cases equal")
