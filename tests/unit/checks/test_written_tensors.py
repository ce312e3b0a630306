"""CKP004: what is in the files of a checkpoint is what the ranks gave."""

from __future__ import annotations

import numpy as np

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Outcome, Verdict
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.stages.checkpoint.records import WrittenTensors

GIVEN = [3, -1, 7, 9]


def judged(*written: int, found: tuple[int, ...] = (3, 1)) -> Outcome:
    """Outcome for two tensors, of three elements and of one."""
    record = WrittenTensors(
        name="rank 0", version=4, tensors=("weight", "optimizer.state.exp_avg.weight"), counts=(3, 1), found=found,
        array="bits",
    )  # fmt: skip
    arrays = {"given": np.array(GIVEN, np.int64), "written": np.array(written, np.int64)}
    return run_check(REGISTRY["CKP004"], Trace(Manifest(complete=True), [record], {"bits": arrays}.__getitem__))


def test_the_same_bits_hold() -> None:
    outcome = judged(*GIVEN)
    assert (outcome.verdict, outcome.num_compared) == (Verdict.HOLDS, 2)


def test_one_other_bit_is_seen() -> None:
    outcome = judged(3, -1, 6, 9)
    assert outcome.verdict is Verdict.VIOLATED
    assert [item.what for item in outcome.finding.bad] == ["weight of rank 0"]
    assert outcome.finding.first.actual == "1 of 3 elements differ"


def test_a_tensor_that_is_not_there_is_seen() -> None:
    outcome = judged(3, -1, 7, found=(3, 0))
    assert [(item.what, item.actual) for item in outcome.finding.bad] == [
        ("optimizer.state.exp_avg.weight of rank 0", "absent")
    ]


def test_nothing_recorded_is_inconclusive() -> None:
    assert run_check(REGISTRY["CKP004"], Trace(Manifest(complete=True), [])).verdict is Verdict.INCONCLUSIVE
