"""Run by test_logprob_kernel.py with TRITON_INTERPRET=1: the kernels on a vocabulary that two ranks hold."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile

import torch
import torch.distributed as dist

from verifier.megatron import vocab_logprob
from verifier.megatron.pack import IGNORE_LABEL

ROWS, COLUMNS = 6, 37


def graded(logits: torch.Tensor, labels: torch.Tensor, **settings: object) -> list[torch.Tensor]:
    """Log-probability, entropy, and the gradient of a sum that weighs both."""
    leaf = logits.clone().requires_grad_()
    values, entropy = vocab_logprob.vocab_parallel_logprob(leaf, labels, temperature=0.7, **settings)
    (values.sum() + entropy.sum() / 3).backward()
    return [values.detach(), entropy.detach(), leaf.grad]


def rank(number: int, file: str, seed: int) -> None:
    """One rank's half of the vocabulary, against the whole of it in one piece by torch operations."""
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=number, world_size=2)
    generator = torch.Generator().manual_seed(seed)
    whole = torch.randn(ROWS, 2 * COLUMNS, generator=generator) * 6
    labels = torch.randint(0, 2 * COLUMNS, (ROWS,), generator=generator)
    labels[2] = IGNORE_LABEL
    half = slice(number * COLUMNS, (number + 1) * COLUMNS)
    expected = graded(whole, labels)
    vocab_logprob.is_fused = lambda _: True
    actual = graded(whole[:, half].contiguous(), labels, vocab_start=number * COLUMNS, group=dist.group.WORLD)
    for got, want in zip(actual, [*expected[:2], expected[2][:, half]], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6)
    dist.destroy_process_group()


if __name__ == "__main__":
    for seed in range(3):
        with tempfile.TemporaryDirectory() as folder:
            context = multiprocessing.get_context("fork")
            ranks = [context.Process(target=rank, args=(number, f"{folder}/store", seed)) for number in range(2)]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join(60)
            if any(process.exitcode != 0 for process in ranks):
                sys.exit(f"seed {seed}: {[process.exitcode for process in ranks]}")
    print("3 vocabularies agree")
