"""CKP004: what is in the files of a checkpoint is what the ranks gave."""

from __future__ import annotations

import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Outcome, Verdict
from verifier.core.manifest import Manifest
from verifier.core.records_run import WrittenState
from verifier.core.records_trainer import WrittenTensors
from verifier.core.trace import Trace

GIVEN = [3, -1, 7, 9]
STATE = WrittenState(name="state.json", version=4, numbers={"step": 4}, rollouts="b", after="b")


def judged(*written: int, found: tuple[int, ...] = (3, 1)) -> Outcome:
    """Outcome for two tensors, of three elements and of one."""
    record = WrittenTensors(
        name="rank 0", version=4, tensors=("weight", "optimizer.state.exp_avg.weight"), counts=(3, 1), found=found,
        array="bits",
    )  # fmt: skip
    arrays = {"given": np.array(GIVEN, np.int64), "written": np.array(written, np.int64)}
    return run_check(REGISTRY["CKP004"], Trace(Manifest(complete=True), [record, STATE], {"bits": arrays}.__getitem__))


def test_the_same_bits_hold() -> None:
    outcome = judged(*GIVEN)
    assert (outcome.verdict, outcome.num_compared) == (Verdict.HOLDS, 4)


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


@pytest.mark.parametrize(
    ("step", "rollouts", "wrong"),
    [
        (4, "b", []),
        (3, "b", ["step of state.json"]),  # that of the resume
        (4, "a", ["batch sampled ahead of state.json"]),
    ],
)
def test_the_controllers_part_is_of_its_step_and_has_the_next_batch(step: int, rollouts: str, wrong: list[str]) -> None:
    tensors = WrittenTensors(name="rank 0", version=4, tensors=(), counts=(), found=(), array="bits")
    state = WrittenState(
        name="state.json", version=4, numbers={"step": step, "data_position": 4}, rollouts=rollouts, after="b"
    )
    none = {"given": np.empty(0, np.int64), "written": np.empty(0, np.int64)}
    outcome = run_check(
        REGISTRY["CKP004"], Trace(Manifest(complete=True), [tensors, state], {"bits": none}.__getitem__)
    )
    assert [item.what for item in outcome.finding.bad] == wrong if outcome.finding else not wrong
    assert outcome.num_compared == 3
