"""Digest speed on one core, against reading the same memory once and against a cryptographic hash."""

import hashlib
import time
from collections.abc import Callable

import torch

from verifier.plan.digest import digest_tensor

NUM_BYTES = 1 << 28
LEAST_SHARE_OF_READING = 0.2
LEAST_TIMES_BLAKE2B = 3.0
MOST_SUMS_OF_A_TINY_TENSOR = 25.0


def best_s(function: Callable[[], object], repeats: int = 5) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        function()
        times.append(time.perf_counter() - begin)
    return min(times)


def test_digest_against_reading_and_blake2b() -> None:
    words = torch.randint(-(2**62), 2**62, (NUM_BYTES // 8,))
    data = words.view(torch.uint8)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        digest_tensor(data)
        digest = NUM_BYTES / best_s(lambda: digest_tensor(data)) / 1e9
        unaligned = (NUM_BYTES - 1) / best_s(lambda: digest_tensor(data[1:])) / 1e9
        reading = NUM_BYTES / best_s(lambda: words.sum()) / 1e9
        part = data[: NUM_BYTES // 8].numpy()
        blake = part.size / best_s(lambda: hashlib.blake2b(part).digest(), 2) / 1e9
    finally:
        torch.set_num_threads(threads)
    print(f"digest {digest:.1f} GB/s, unaligned {unaligned:.1f}, reading {reading:.1f}, blake2b {blake:.2f}")
    assert digest > LEAST_SHARE_OF_READING * reading
    assert digest > LEAST_TIMES_BLAKE2B * blake


def test_a_tiny_tensor_costs_little() -> None:
    norm = torch.randn(64)
    digest_tensor(norm)

    def hundred(function: Callable[[torch.Tensor], object]) -> None:
        for _ in range(100):
            function(norm)

    turns = [(best_s(lambda: hundred(digest_tensor), 1), best_s(lambda: hundred(torch.sum), 1)) for _ in range(40)]
    digest_us, sum_us = (min(times) * 1e4 for times in zip(*turns, strict=True))
    print(f"a tensor of 64 floats: digest {digest_us:.1f} us, torch.sum {sum_us:.1f} us")
    assert digest_us < MOST_SUMS_OF_A_TINY_TENSOR * sum_us
