"""TRN001 and LSS002: the numbers that a step reports, apart from the weights that it moves."""

from __future__ import annotations

import math

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import change, make_trace, with_facts
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.stage import Stage


@pytest.mark.parametrize(("norm", "verdict"), [(2.000019, Verdict.HOLDS), (2.00003, Verdict.VIOLATED)])
def test_a_norm_of_other_gradients_is_seen(norm: float, verdict: Verdict) -> None:
    """1e-5 of a norm of 2 is allowed; the weights are right in both."""
    outcome = run_check(REGISTRY["TRN001"], make_trace(change(Stage.TRAIN, "step", with_facts(grad_norm=norm))))
    assert outcome.verdict is verdict
    if verdict is Verdict.VIOLATED:
        assert outcome.finding.count == 1
        assert outcome.finding.first.sentence == "the optimizer clipped by a gradient norm of 2.00003, which is 2"


def test_a_norm_that_is_not_finite_is_seen() -> None:
    outcome = run_check(REGISTRY["TRN001"], make_trace(change(Stage.TRAIN, "step", with_facts(grad_norm=math.nan))))
    assert outcome.verdict is Verdict.VIOLATED


def test_a_step_whose_norm_was_not_recorded_is_inconclusive() -> None:
    outcome = run_check(REGISTRY["TRN001"], make_trace(change(Stage.TRAIN, "step", lambda item: None)))
    assert outcome.verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(("loss", "verdict"), [(7.37, Verdict.HOLDS), (7.38, Verdict.VIOLATED)])
def test_in_bf16_the_loss_is_held_against_the_noise_of_the_run(loss: float, verdict: Verdict) -> None:
    """A noise of 0.05 allows 0.375 of a mean magnitude of 7.5; the text says where that bound comes from."""
    noisy = with_facts(gradient_noise=0.05)
    seen = [
        noisy(item) if item.kind == "gradient" else item for item in change(Stage.TRAIN, "step", with_facts(loss=loss))
    ]
    outcome = run_check(REGISTRY["LSS002"], make_trace(seen))
    assert outcome.verdict is verdict
    if verdict is Verdict.VIOLATED:
        assert outcome.finding.first.allowed == (
            "0.375, 0.05 of the mean magnitude of a token's loss "
            "(this run's noise: the gradients of transformers in the run's dtype against those in fp32)"
        )
