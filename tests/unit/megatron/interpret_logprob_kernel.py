"""Run by test_logprob_kernel.py with TRITON_INTERPRET=1: the GPU kernels, interpreted, against torch operations."""

from __future__ import annotations

import math

import torch

from verifier.megatron import vocab_logprob
from verifier.megatron.pack import IGNORE_LABEL

ROWS = 6
BOUNDS = {torch.float32: {"rtol": 1e-5, "atol": 2e-5}, torch.bfloat16: {"rtol": 2**-7, "atol": 1e-6}}
"""One rounding to bfloat16; in float32, sums of 9,000 terms in another order."""


def graded(logits: torch.Tensor, labels: torch.Tensor, settings: dict) -> list[torch.Tensor]:
    """Log-probability, entropy, and the gradient of a sum in which every row weighs differently."""
    leaf = logits.clone().requires_grad_()
    values, entropy = vocab_logprob.vocab_parallel_logprob(leaf, labels, **settings)
    weights = torch.arange(1, len(logits) + 1, dtype=values.dtype)
    total = values * weights
    if entropy is not None:
        total = total + entropy * weights.flip(0) / 3
    total.sum().backward()
    return [values.detach(), *([] if entropy is None else [entropy.detach()]), leaf.grad]


def problem(vocab: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits with a row of no label that is NaN, and columns of -inf."""
    logits = torch.randn(ROWS, vocab, dtype=torch.float64).mul(8).to(dtype)
    labels = torch.randint(0, vocab, (ROWS,))
    logits[1] = math.nan
    labels[1] = IGNORE_LABEL
    logits[2, labels[2] - 1 if labels[2] else 1 : labels[2] or 2] = -math.inf
    return logits, labels


num_equal = 0
torch.manual_seed(0)
for vocab in (1, 7, 4096, 4097, 9000):
    for dtype in (torch.float32, torch.bfloat16):
        for temperature in (1.0, 0.6):
            for entropy in (True, False):
                logits, labels = problem(vocab, dtype)
                settings = {"temperature": temperature, "entropy": entropy}
                vocab_logprob.is_fused = lambda _: False
                expected = graded(logits, labels, settings)
                vocab_logprob.is_fused = lambda _: True
                for got, want in zip(graded(logits, labels, settings), expected, strict=True):
                    torch.testing.assert_close(got, want, **BOUNDS[got.dtype])
                num_equal += 1
print(f"{num_equal} cases agree")
