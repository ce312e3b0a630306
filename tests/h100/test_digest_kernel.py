"""The digest kernel on a GPU: the host's bits, at the speed of memory."""

from __future__ import annotations

import pytest
import torch

from verifier.plan.digest import BLOCK_BYTES, digest_tensor, digest_tensors, finish, lane_sums_torch
from verifier.plan.digest_triton import BLOCKS_PER_STEP, max_programs

pytestmark = pytest.mark.h100(gpus=1)

STEP_BYTES = BLOCKS_PER_STEP * BLOCK_BYTES
LEAST_SHARE_OF_READING = 0.8
"""Of the rate at which an int64 sum reads the same bytes."""


def random_bytes(num_bytes: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, device="cuda")


def sizes() -> list[int]:
    wave = max_programs(torch.device("cuda", 0)) * STEP_BYTES
    edges = [BLOCK_BYTES, STEP_BYTES, wave, wave + STEP_BYTES, 2 * wave]
    return [1, 2, 3, 4, 5, 513, *(edge + off for edge in edges for off in (-1, 0, 1))]


def test_equals_the_host_at_every_edge() -> None:
    for num_bytes in sizes():
        data = random_bytes(num_bytes)
        assert digest_tensor(data) == digest_tensor(data.cpu()), num_bytes


def test_equals_the_reference_on_the_same_gpu() -> None:
    data = random_bytes(3 * STEP_BYTES + 17)
    low, high = lane_sums_torch(data)
    assert digest_tensor(data) == finish(low % 2**64, high % 2**64, data.numel())


def test_more_than_four_billion_bytes() -> None:
    data = torch.arange((1 << 32) // 8 + 1001, device="cuda").view(torch.uint8)
    assert digest_tensor(data) == digest_tensor(data.cpu())


@pytest.mark.parametrize("offset", [1, 2, 4, 8])
def test_views_that_start_anywhere(offset: int) -> None:
    data = random_bytes(STEP_BYTES + 100)[offset:]
    assert digest_tensor(data) == digest_tensor(data.cpu())


def test_many_tensors_with_one_copy_back() -> None:
    tensors = [torch.randn(n, device="cuda", dtype=torch.bfloat16) for n in (0, 1, 64, 4096, 1_000_003)]
    tensors.append(tensors[-1].cpu())
    assert digest_tensors(tensors) == [digest_tensor(tensor.cpu()) for tensor in tensors]


def test_reads_at_the_speed_of_memory(measured) -> None:
    words = torch.randint(-(2**62), 2**62, (1 << 30,), device="cuda")
    shares = []
    for _ in range(9):
        digest_s = seconds(lambda: digest_tensor(words))
        sum_s = seconds(lambda: words.sum().item())
        shares.append(sum_s / digest_s)
    share = sorted(shares)[len(shares) // 2]
    digest_rate, sum_rate = words.nbytes / digest_s / 1e9, words.nbytes / sum_s / 1e9
    measured(digest_gb_s=round(digest_rate), int64_sum_gb_s=round(sum_rate), median_share=round(share, 3))
    assert share > LEAST_SHARE_OF_READING


def seconds(function) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    function()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
