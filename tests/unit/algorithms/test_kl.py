"""KL estimates: gradients by finite differences, -infinity, and their expectations over a small vocabulary."""

import math

import numpy as np
import pytest
import torch

from verifier.algorithms.kl import KL_KINDS, kl_estimate, kl_penalty
from verifier.errors import UsageError


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("d", [-1.5, -1e-3, 0.0, 0.4, 3.0])
def test_gradients_are_those_of_finite_differences(kind, d):
    current = torch.tensor([-2.0 + d], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-2.0], dtype=torch.float64)
    kl_estimate(current, reference, kind).sum().backward()
    step = 1e-5
    above, below = (kl_estimate(np.array([-2.0 + d + s]), np.array([-2.0]), kind)[0] for s in (step, -step))
    assert current.grad.item() == pytest.approx((above - below) / (2 * step), abs=1e-8)  # step^2 and 1e-16 / step


def expected(kind):
    """(expectation of the value, expectation of the gradient by logits) over a vocabulary of 5."""
    logits = torch.tensor([0.3, -1.0, 0.5, 2.0, -0.2], dtype=torch.float64, requires_grad=True)
    reference = torch.log_softmax(torch.tensor([1.0, 0.2, -0.5, 0.1, 0.4], dtype=torch.float64), -1)
    current = torch.log_softmax(logits, -1)
    estimate = kl_estimate(current, reference, kind)
    (estimate * current.exp().detach()).sum().backward()
    return (estimate * current.exp()).sum().item(), logits, reference


def gradient(divergence, logits):
    leaf = logits.detach().clone().requires_grad_()
    divergence(torch.log_softmax(leaf, -1)).backward()
    return leaf.grad


@pytest.mark.parametrize("kind", ["k1", "k3"])
def test_k1_and_k3_are_unbiased(kind):
    value, logits, reference = expected(kind)
    current = torch.log_softmax(logits, -1)
    assert value == pytest.approx((current.exp() * (current - reference)).sum().item(), rel=1e-12)


def test_expected_gradients_are_none_reverse_and_forward():
    for kind, divergence in {
        "k1": lambda own, other: 0 * own.sum(),
        "k2": lambda own, other: (own.exp() * (own - other)).sum(),
        "k3": lambda own, other: (other.exp() * (other - own)).sum(),
    }.items():
        _, logits, reference = expected(kind)
        want = gradient(lambda own, d=divergence, r=reference: d(own, r), logits)
        torch.testing.assert_close(logits.grad, want, rtol=0, atol=1e-14)


@pytest.mark.parametrize("kind", KL_KINDS)
def test_impossible_tokens_are_finite(kind):
    values = np.array([-math.inf, -1.0, -math.inf])
    assert np.isfinite(kl_estimate(values, values[[1, 0, 2]], kind)).all()
    assert kl_estimate(values, values, kind).tolist() == [0, 0, 0]


def test_a_penalty_reads_the_mask_alone_and_an_empty_answer_has_none():
    old, reference = np.array([-1.0, math.nan, -2.0]), np.array([-1.5, math.nan, -2.25])
    got = kl_penalty([old, old[:0]], [reference, old[:0]], [[True, False, True], []], "k1")
    assert got.tolist() == [0.75, 0]


def test_an_unknown_kind_lists_the_known():
    with pytest.raises(UsageError, match=r"KL estimate `abs` is unknown \(known: k1, k2, k3\)"):
        kl_penalty([], [], [], "abs")
