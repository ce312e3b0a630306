"""The oracle's losses: against those under test, which share no code with them; and what they say when these differ.

What this does not exercise: models (tests/dist/test_train_sampled.py).
"""

from __future__ import annotations

import pytest
import torch

from verifier.algorithms.loss_options import LossOptions
from verifier.algorithms.losses import LossInputs, token_loss
from verifier.oracle.policy_hf import token_losses

OPTIONS = {
    "clip_low": 0.1, "clip_high": 0.3, "dual_clip": None, "kl_weight": 0.0, "kl_kind": "k3", "entropy_weight": 0.0,
}  # fmt: skip
CASES = {
    "clipped": {},
    "clipped with dual clip": {"dual_clip": 1.2},
    "gspo": {},
    "cispo": {},
    "importance": {},
    "cross_entropy": {},
    "clipped with k1": {"kl_weight": 0.5, "kl_kind": "k1"},
    "clipped with k2": {"kl_weight": 0.5, "kl_kind": "k2"},
    "cispo with k3": {"kl_weight": 0.5, "kl_kind": "k3", "entropy_weight": 0.1},
}


def both(name, **changed):
    """Loss and gradient by the oracle and by the trainer's function, on one sequence of 64 tokens."""
    generator = torch.Generator().manual_seed(5)
    logits, divisor, reference, advantage = (
        torch.randn(shape, generator=generator, dtype=torch.float64) * size
        for shape, size in (((64, 7), 1.0), (64, 0.3), (64, 0.3), (64, 1.0))
    )
    found = []
    for side in ("oracle", "trainer"):
        scores = logits.clone().requires_grad_(True)
        every = scores.log_softmax(-1)
        logprob, entropy = every[:, 0], -(every.exp() * every).sum(-1)
        columns = {
            "divisor": divisor + every[:, 0].detach(), "reference": reference + every[:, 0].detach(),
            "advantage": advantage,
        }  # fmt: skip
        if side == "oracle":
            loss = token_losses(logprob, entropy, columns, {**OPTIONS, **CASES[name], "loss": name.split()[0]})
        else:
            rows = LossInputs(
                current_T=logprob, entropy_T=entropy, divisor_T=columns["divisor"], advantage_T=advantage,
                reference_T=columns["reference"], mask_T=torch.ones(64, dtype=torch.bool),
                sequence_mean=lambda values: values.mean().expand(64),
            )  # fmt: skip
            loss = token_loss(name.split()[0], rows, LossOptions(**{**OPTIONS, **CASES[name], **changed}))
        loss.sum().backward()
        found.append((loss.detach(), scores.grad))
    return found


@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_are_those_of_the_trainers_losses(name):
    (ours, gradient), (theirs, other) = both(name)
    assert (ours - theirs).abs().max() < 1e-12  # float64: the same formula, written twice
    assert (gradient - other).abs().max() < 1e-12


@pytest.mark.parametrize("changed", [{"clip_high": 0.1}, {"clip_low": 0.3}, {"kl_weight": 0.5}])
def test_another_option_gives_another_gradient(changed):
    (_, gradient), (_, other) = both("clipped", **changed)
    assert (gradient - other).abs().max() > 0.01


def test_an_unknown_loss_has_no_formula():
    with pytest.raises(ValueError, match="no formula of the loss `mine` is known"):
        token_losses(torch.zeros(1), torch.zeros(1), {"advantage": torch.zeros(1), "divisor": torch.zeros(1)}, {
            **OPTIONS, "loss": "mine"
        })  # fmt: skip
