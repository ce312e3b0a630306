"""TRN001: the norm that an optimizer clips by, apart from the weights that it moves."""

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
