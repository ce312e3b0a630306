"""Trainer against engine in bf16: which differences of a step its noise allows.

What this does not exercise: real noise (tests/dist/test_train_sampled.py), and bounds in fp32 (tests/snapshots).
"""

from __future__ import annotations

import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.records_policy import PolicyColumns
from verifier.core.trace import Trace
from verifier.trainer.mismatch import sampled_noise

NUM = 400
NOISE = 0.01
"""Standard deviation of each side, nats."""


def judged(change, *, num=NUM, measured=1, routed=False, recorded=True):
    """Outcome of LGP009 on a step whose engine says what `change` makes of the exact log-probabilities."""
    generator = np.random.default_rng(5)
    exact = -generator.uniform(1.0, 4.0, num)
    noises = generator.normal(0.0, NOISE, (3, num))
    columns = {
        "old": exact + noises[0], "engine": change(exact) + noises[1], "mask": np.ones(num, bool),
        "version": np.ones(num, np.int32),
    }  # fmt: skip
    policy = PolicyColumns(
        name="policy inputs", version=2, ids=("x",), lengths=(num,), ratio_over="old", weight_level="", weight_cap=2.0,
        mask_level="", mask_low=0.5, mask_high=2.0, max_staleness=0, trained_version=1, array="policy-0000-000000",
    )  # fmt: skip
    noise = sampled_noise(2, measured, exact + noises[2], exact, np.arange(num) % 8, 8, routed=routed)
    manifest = Manifest(dtype="bfloat16", complete=True)
    trace = Trace(manifest, [policy, noise] if recorded else [policy], lambda item: columns)
    return run_check(REGISTRY["LGP009"], trace)


def bad(outcome):
    return {item.what for item in outcome.finding.bad} if outcome.finding else set()


@pytest.mark.parametrize("measured", [1, 0])
@pytest.mark.parametrize("routed", [False, True])
def test_noise_of_both_sides_is_allowed(measured, routed):
    assert judged(lambda exact: exact, measured=measured, routed=routed).verdict is Verdict.HOLDS


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda exact: exact * 1.01, "slope over log-probability"),
        (lambda exact: exact + 0.008, "signed mean"),
        (lambda exact: exact + 0.04 * np.sign(np.sin(np.arange(len(exact)))), "root mean square"),
        (lambda exact: exact + np.where(np.arange(len(exact)) == 7, 0.5, 0.0), "x"),
    ],
    ids=["factor", "shift", "coarser", "one token"],
)
def test_differences_beyond_noise_are_seen(change, seen):
    outcome = judged(change)
    assert outcome.verdict is Verdict.VIOLATED
    assert seen in bad(outcome)


def test_one_token_of_a_mixture_may_be_off_and_not_nan():
    at = lambda value: lambda exact: np.where(np.arange(len(exact)) == 7, value, exact)  # noqa: E731
    assert judged(at(-4.5), routed=True).verdict is Verdict.HOLDS
    assert "x" in bad(judged(at(np.nan), routed=True))
    assert "x" in bad(judged(at(-np.inf), routed=True))


def test_few_tokens_have_no_statistics():
    assert judged(lambda exact: exact * 1.01, num=50).verdict is Verdict.HOLDS


def test_without_noise_nothing_is_judged():
    outcome = judged(lambda exact: exact, recorded=False)
    assert outcome.verdict is Verdict.INCONCLUSIVE
    assert "no measured noise of bfloat16" in (outcome.error or "")
