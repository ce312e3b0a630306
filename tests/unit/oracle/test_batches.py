"""Sequences of one length together, against each of them alone: logits, and magnitudes of gradients, of every family.

What this does not exercise: losses (test_policy.py), and the checks (tests/dist/test_train_sampled.py).
"""

from __future__ import annotations

import pytest
import torch

from verifier.model.named import resolve_model
from verifier.oracle import batches_hf, magnitudes_hf
from verifier.oracle.batches_hf import batches, logits_of
from verifier.oracle.magnitudes_hf import magnitudes
from verifier.oracle.routes_hf import mixtures_of
from verifier.oracle.step_hf import trainable
from verifier.runs.model_under_test import cache_folder

NAMES = ("tiny:add", "tiny:add-moe", "tiny:add-deepseek", "tiny:nemotron-h")
LENGTHS = (5, 7, 5, 7, 5, 6)


def made(name):
    """A model, sequences, and routes of all but the last sequence, [position, layer, two experts] each."""
    model = trainable(resolve_model(name, cache_folder(), "float32"), torch.float32)
    generator = torch.Generator().manual_seed(7)
    sequences = [torch.randint(3, 30, (length,), generator=generator).tolist() for length in LENGTHS]
    num = model.config.num_experts_per_tok if mixtures_of(model) else 0
    routes = [
        [
            [at, layer, *torch.randperm(8, generator=generator)[:num].tolist()]
            for layer in mixtures_of(model)
            for at in range(length - 1)
        ]
        for length in LENGTHS
    ]
    return model, sequences, [*routes[:-2], [], []]


@pytest.mark.parametrize("name", NAMES)
def test_together_is_as_alone(name, monkeypatch):
    model, sequences, routes = made(name)
    generator = torch.Generator().manual_seed(8)
    shares = [torch.rand(length - 1, generator=generator, dtype=torch.float64) for length in LENGTHS]
    shares[2][:] = 0  # no gradient
    logits, sums = {}, {}
    for most in (2048, 1):
        monkeypatch.setattr(batches_hf, "MAX_TOKENS", most)
        found = list(batches(model, sequences, routes))
        sizes = [len(batch.places) for batch in found]
        # the last two have no routes, and of a mixture are no batch with those that have
        assert sorted(sizes) == ([1] * 6 if most == 1 else [1, 1, 2, 2] if mixtures_of(model) else [1, 2, 3])
        assert sorted(at for batch in found for at in batch.places) == list(range(6))
        sums[most] = [torch.zeros_like(parameter) for parameter in model.parameters()]
        for batch in found:
            with torch.no_grad():
                logits |= {(most, at): row for at, row in zip(batch.places, logits_of(model, batch), strict=True)}
            part = magnitudes(model, batch, torch.stack([shares[at] for at in batch.places]), 0.7)
            sums[most] = [sum_ if more is None else sum_ + more for sum_, more in zip(sums[most], part, strict=True)]
    for at in range(6):
        assert (logits[2048, at] - logits[1, at]).abs().max() < 1e-5
    for together, alone in zip(sums[2048], sums[1], strict=True):
        assert (together - alone).abs().max() <= 1e-4 * alone.abs().max()
    assert model.config._experts_implementation == "eager"


def test_magnitudes_do_not_cancel(monkeypatch):
    """They are those of sequences, however many are computed at once; the gradient of the sum is smaller."""
    model, sequences, _ = made("tiny:add")
    (batch,) = (batch for batch in batches(model, sequences) if len(batch.places) == 3)
    share = torch.ones(3, 4, dtype=torch.float64)
    found = []
    for most in (2**24, 1):
        monkeypatch.setattr(magnitudes_hf, "MAX_ELEMENTS", most)
        found.append(magnitudes(model, batch, share, 1.0))
    log_sum = torch.logsumexp(logits_of(model, batch)[:, :-1].double(), dim=-1)
    whole = torch.autograd.grad(log_sum.sum(), list(model.parameters()))
    for together, alone, gradient in zip(*found, whole, strict=True):
        assert (together - alone).abs().max() <= 1e-4 * alone.abs().max()
        assert (gradient.abs() - alone).max() <= 1e-4 * alone.abs().max()
    assert any((gradient.abs().sum() < 0.9 * alone.sum()) for alone, gradient in zip(found[1], whole, strict=True))


def test_large_vocabularies_are_computed_one_by_one(monkeypatch):
    model, sequences, _ = made("tiny:add")
    monkeypatch.setattr(batches_hf, "MAX_LOGITS", 32 * 10)
    assert sorted(len(batch.places) for batch in batches(model, sequences)) == [1, 1, 1, 1, 2]
