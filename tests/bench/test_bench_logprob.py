"""Memory of log-probability and entropy at a real vocabulary, forward and backward, every allocation counted."""

import time
from collections.abc import Callable

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from verifier.megatron.vocab_logprob import vocab_parallel_logprob

ROWS, VOCAB = 128, 151_936
LIMIT = 0.3
"""Of the logits' bytes, beyond the logits and their gradient."""


def naive(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The textbook: a log-softmax of the whole, and a product of the whole."""
    logp = torch.log_softmax(logits.float(), -1)
    return logp.gather(1, labels[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def run(fn: Callable, logits: torch.Tensor, labels: torch.Tensor) -> float:
    """Forward and backward; seconds."""
    logits.grad = None
    begin = time.perf_counter()
    logprob, entropy = fn(logits, labels)
    (logprob.sum() + entropy.sum()).backward()
    return time.perf_counter() - begin


def peak_bytes(fn: Callable, logits: torch.Tensor, labels: torch.Tensor) -> int:
    """Most bytes allocated at once on top of the logits, forward and backward."""
    logits.grad = None
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
        run(fn, logits, labels)
    events = profiled.profiler.kineto_results.events()
    changes = sorted((item.start_ns(), item.nbytes()) for item in events if item.name() == "[memory]")
    held, peak = 0, 0
    for _, num_bytes in changes:
        held += num_bytes
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_less_than_a_third_of_the_logits_is_needed_beside_them_and_their_gradient(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, VOCAB, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCAB, (ROWS,), generator=generator)
    size = logits.numel() * logits.element_size()
    ours, theirs = (peak_bytes(fn, logits, labels) for fn in (vocab_parallel_logprob, naive))
    ours_s, naive_s = (min(run(fn, logits, labels) for _ in range(2)) for fn in (vocab_parallel_logprob, naive))
    extra, naive_extra = ours / size - 1, theirs / size - 1
    print(
        f"\n{dtype}: {extra:.3f} of the logits' bytes beside logits and gradient (limit {LIMIT}), "
        f"naive {naive_extra:.2f}: {naive_extra / extra:.0f} x; {ours_s:.2f} s, naive {naive_s:.2f} s"
    )
    assert ours >= size
    assert extra < LIMIT
