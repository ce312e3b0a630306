"""The KL penalty in the reward: the three estimates, the mask before filters, and traces that lack its columns."""

import math

import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.stages.advantage.records import Advantages, PolicyColumns

OLD = np.array([np.nan, -1.0, -2.0, np.nan, -30.0], np.float32)
REFERENCE = np.array([np.nan, -1.5, -1.75, np.nan, -np.inf], np.float32)
OWN = np.array([False, True, True, False, True])
DISTANCES = ((0.5, -0.25), (9970.0,))


def judged(penalties, kind, *, left_out=(), weight=0.5):
    arrays = {"old": OLD, "penalty_reference": REFERENCE, "own": OWN, "mask": np.zeros(5, bool)}  # all were dropped
    records = [
        Advantages(
            name="advantages", version=1, estimator="rloo", ids=("x", "y"), groups=("g", "g"), trajectories=("x", "y"),
            rewards=(1.0, 0.0), penalties=penalties, kl_weight=weight, kl_kind=kind, token_counts=(2, 1),
            advantages=(0.0, 0.0),
        ),
        PolicyColumns(
            name="policy inputs", version=1, ids=("x", "y"), lengths=(3, 2), ratio_over="old", weight_level="",
            weight_cap=2.0, max_staleness=0, trained_version=0,
            array="policy",
        ),
    ]  # fmt: skip
    return run_check(
        REGISTRY["ADV004"],
        Trace(Manifest(), records, lambda item: {key: arrays[key] for key in arrays if key not in left_out}),
    )


def right(kind, weight=0.5):
    by = {
        "k1": lambda d: d,
        "k2": lambda d: d * d / 2,
        "k3": lambda d: math.exp(-min(d, 20.0)) - 1 + min(d, 20.0),
    }[kind]
    return tuple(weight * sum(map(by, own)) for own in DISTANCES)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_weighted_sum_holds_and_all_else_does_not(kind):
    sums = right(kind)
    assert judged(sums, kind).verdict is Verdict.HOLDS
    for wrong in (
        tuple(-value for value in sums), (sums[0] / 2, sums[1]), (0.0, 0.0), right(kind, 1.0), (math.nan, sums[1]),
    ):  # fmt: skip
        assert judged(wrong, kind).verdict is Verdict.VIOLATED


def test_a_trace_without_the_columns_has_no_subject():
    outcome = judged(right("k1"), "k1", left_out=("own", "penalty_reference"))
    assert outcome.verdict is Verdict.INCONCLUSIVE
    assert outcome.num_compared == 0
