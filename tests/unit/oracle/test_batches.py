"""Sequences of one length together, against each of them alone: logits, all and some, of every family.

What this does not exercise: losses and gradients (test_policy.py), and the checks (tests/dist/test_train_sampled.py).
"""

from __future__ import annotations

import pytest
import torch

from verifier.model.named import resolve_model
from verifier.oracle import batches_hf
from verifier.oracle.batches_hf import batches, hidden_of, slices_of
from verifier.oracle.routes_hf import mixtures_of
from verifier.oracle.streaming_hf import StreamedModel
from verifier.runs.model_under_test import cache_folder

NAMES = ("tiny:add", "tiny:add-moe", "tiny:add-deepseek", "tiny:nemotron-h")
LENGTHS = (5, 7, 5, 7, 5, 6)


def made(name):
    """A model, sequences, and routes of all but the last sequence, [position, layer, two experts] each."""
    model = StreamedModel(resolve_model(name, cache_folder(), "float32"), torch.float32)
    generator = torch.Generator().manual_seed(7)
    sequences = [torch.randint(3, 30, (length,), generator=generator).tolist() for length in LENGTHS]
    num = model.config.num_experts_per_tok if mixtures_of(model.model) else 0
    routes = [
        [
            [at, layer, *torch.randperm(8, generator=generator)[:num].tolist()]
            for layer in mixtures_of(model.model)
            for at in range(length - 1)
        ]
        for length in LENGTHS
    ]
    return model, sequences, [*routes[:-2], [], []]


@pytest.mark.parametrize("name", NAMES)
def test_together_is_as_alone(name):
    model, sequences, routes = made(name)
    logits = {}
    for most in (2048, 1):
        found = list(batches(sequences, routes, most=most))
        sizes = [len(batch.places) for batch in found]
        # the last two have no routes, and of a mixture are no batch with those that have
        assert sorted(sizes) == ([1] * 6 if most == 1 else [1, 1, 2, 2] if mixtures_of(model.model) else [1, 2, 3])
        assert sorted(at for batch in found for at in batch.places) == list(range(6))
        for batch in found:
            with torch.no_grad():
                hidden = hidden_of(model, batch)
                for at, row in zip(batch.places, hidden, strict=True):
                    logits[most, at] = model.logits(row)
                    assert (model.logits(row[[1, 3]]) - logits[most, at][[1, 3]]).abs().max() < 1e-5
    for at in range(6):
        assert (logits[2048, at] - logits[1, at]).abs().max() < 1e-5


def test_logits_of_large_vocabularies_are_computed_some_at_a_time(monkeypatch):
    model, _, _ = made("tiny:add")
    monkeypatch.setattr(batches_hf, "MAX_LOGITS", 32 * 10)
    assert [*slices_of(model, 23)] == [slice(0, 10), slice(10, 20), slice(20, 30)]
