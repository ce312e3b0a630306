"""Numbers of an evaluation by MET003 and MET004: what they are a mean of, and which problems count as solved.

What this does not exercise: real runs (tests/dist/test_train_clean.py), and bugs that MET003 catches (tests/faults).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from verifier.checks.evaluation_numbers import evaluation_misreported, summary_misreported
from verifier.checks.policy_step import reward_differs_from_second_reader
from verifier.core.manifest import Manifest
from verifier.core.record import Real, Record
from verifier.core.records_policy import GivenRewards, RunSummary, SolvedProblems, WrittenMetrics
from verifier.core.trace import Trace

SHORTFALL = np.array([np.nan, 0, 0, np.nan, 0.5, 0], np.float32)
MASK = np.array([False, True, True, False, True, True])


def line(**values: Real) -> WrittenMetrics:
    return WrittenMetrics(
        name="metrics.jsonl", version=2, step=2, values={"held_out_version": 2, **values}, recorded={}
    )  # fmt: skip


def rewards(*given: float, ids: tuple[str, ...] = ("a", "b", "c", "d")) -> GivenRewards:
    return GivenRewards(
        name="held-out accuracy", version=2, reward="answer", ids=ids, texts=("7", "x", "8", "7")[: len(ids)],
        answers=("7",) * len(ids), rewards=given,
    )  # fmt: skip


def wrong(
    *records: Record, shortfall: np.ndarray = SHORTFALL, config: Mapping[str, Any] | None = None
) -> list[str]:  # fmt: skip
    arrays = {"all": {"mask": MASK, "shortfall": shortfall}}
    trace = Trace(Manifest(complete=True, config=config or {}), records, arrays.__getitem__)
    return [item.what for item in evaluation_misreported(trace) if not item.same]


def solved(*found: bool) -> SolvedProblems:
    return SolvedProblems(
        name="held-out problems", version=2, ids=("p", "q"), lengths=(3, 3), solved=found, array="all"
    )  # fmt: skip


def told(
    accuracy: Real | None, *records: Record, alone: bool = True, loss: Real = 1.5, evaluated: int = 2
) -> list[str]:  # fmt: skip
    """What MET004 names of a run that ends with these numbers."""
    summary = RunSummary(name="run", version=2, loss=1.5, accuracy=accuracy, alone=alone)
    values = {"loss": loss} if alone else {"loss": loss, "accuracy": 0.5}
    config = {"evaluation": {"num_problems": 4 if any(isinstance(item, GivenRewards) for item in records) else 2}}
    arrays = {"all": {"mask": MASK, "shortfall": SHORTFALL}}
    trace = Trace(
        Manifest(complete=True, config=config),
        [line(held_out_version=evaluated, **values), summary, *records],
        arrays.__getitem__,
    )
    return [item.what for item in summary_misreported(trace) if not item.same]


def test_a_run_ends_with_the_numbers_of_its_last_step_and_evaluation() -> None:
    assert told(0.5, alone=False) == []
    assert told(None) == []
    assert told(0.5, rewards(1, 0, 0, 1)) == []
    assert told(0.5, solved(True, False)) == []


def test_other_numbers_at_the_end_of_a_run_are_named() -> None:
    assert told(0.5, alone=False, loss=1.25) == ["loss of the run"]
    assert told(0.75, alone=False) == ["accuracy of the run"]
    assert told(0.5, alone=False, evaluated=0) == ["weights of the accuracy"]
    assert told(2 / 3, rewards(1, 0, 0, 1)) == ["accuracy"]
    assert told(2 / 3, rewards(1, 0, 1, ids=("a", "b", "c"))) == ["problems of held-out accuracy"]
    assert told(1.0, solved(True, True)) == ["q"]


@pytest.mark.parametrize(
    ("accuracy", "problems", "rollouts", "named"),
    [(None, 4, None, True), (None, 0, None, False), (None, 4, "recorded", False), (0.5, 4, None, False)],
)
def test_a_run_with_held_out_problems_ends_with_an_accuracy(
    accuracy: Real | None, problems: int, rollouts: str | None, named: bool
) -> None:
    summary = RunSummary(name="run", version=2, loss=1.5, accuracy=accuracy, alone=True)
    config = {"evaluation": {"num_problems": problems}, "data": {"rollouts": rollouts}}
    trace = Trace(Manifest(complete=True, config=config), [line(loss=1.5), summary], {}.__getitem__)
    found = [item.what for item in summary_misreported(trace) if not item.same]
    assert found == (["accuracy of the run"] if named else [])


def test_a_mean_over_all_problems_holds() -> None:
    assert wrong(line(accuracy=0.5), rewards(1, 0, 0, 1)) == []
    assert wrong(line(accuracy=0.5), solved(True, False)) == []


@pytest.mark.parametrize("shown", [0.6, 0.5 + 1e-8, "nan"])
def test_another_number_is_named(shown: Real) -> None:
    assert wrong(line(accuracy=shown), rewards(1, 0, 0, 1)) == ["accuracy"]
    assert wrong(line(accuracy=shown), solved(True, False)) == ["accuracy"]


def test_a_number_that_no_line_has_and_one_under_another_version_are_named() -> None:
    assert wrong(line(), rewards(1, 0, 0, 1)) == ["accuracy"]
    assert wrong(line(accuracy=0.5, held_out_version=1), rewards(1, 0, 0, 1)) == ["held_out_version"]


def test_problems_that_count_twice_or_never_are_named() -> None:
    assert wrong(line(accuracy=2 / 3), rewards(1, 0, 1)) == ["problems of held-out accuracy"]
    assert wrong(line(accuracy=0.5), rewards(1, 0, 0, 1, ids=("a", "b", "c", "a"))) == ["problems of held-out accuracy"]
    assert wrong(line(accuracy=2 / 3), solved(True, False, True)) == ["problems of held-out problems"]


def test_a_problem_that_is_solved_otherwise_is_named() -> None:
    assert wrong(line(accuracy=1.0), solved(True, True)) == ["q"]
    assert wrong(line(accuracy=0.0), solved(False, False)) == ["p"]


def test_rewards_of_an_evaluation_have_a_second_reader() -> None:
    trace = Trace(Manifest(complete=True), [rewards(1, 0, 1, 1)], {}.__getitem__)
    assert [item.what for item in reward_differs_from_second_reader(trace) if not item.same] == ["c"]


@pytest.mark.parametrize(("asked", "named"), [(4, []), (5, ["problems of held-out accuracy"])])
def test_problems_that_were_never_asked_are_named(asked: int, named: list[str]) -> None:
    config = {"evaluation": {"num_problems": asked}}
    assert wrong(line(accuracy=0.5), rewards(1, 0, 0, 1), config=config) == named


def begun(*records: Record, config: Mapping[str, Any] | None = None, **values: Real) -> list[str]:
    """What MET003 names of a run whose first line has the numbers of the evaluation before it."""
    shown = WrittenMetrics(name="metrics.jsonl", version=1, step=1, values=values, recorded={})
    before = [replace(item, version=0) for item in records]
    return wrong(shown, *before, config={"evaluation": {"num_problems": 2, "every": 5}} if config is None else config)


def test_numbers_of_an_evaluation_before_the_first_step_are_judged() -> None:
    four = {"evaluation": {"num_problems": 4, "every": 5}}
    assert begun(solved(True, False), accuracy=0.5, held_out_version=0) == []
    assert begun(rewards(1, 0, 0, 1), config=four, accuracy=0.5, held_out_version=0) == []
    assert begun(rewards(1, 0, 0, 1), config=four, accuracy=1.0, held_out_version=0) == ["accuracy"]
    assert begun(solved(True, True), accuracy=1.0, held_out_version=0) == ["q"]
    assert begun(solved(True, False), accuracy=0.5, held_out_version=1) == ["held_out_version"]


def test_an_evaluation_before_the_first_step_that_comes_after_an_update_is_named() -> None:
    assert begun(solved(), accuracy=0.0, held_out_version=0) == ["problems of held-out problems"]
    assert begun(solved(), accuracy=0.5, held_out_version=0) == ["problems of held-out problems", "accuracy"]


def test_a_run_that_evaluates_each_step_has_none_before_the_first() -> None:
    config = {"evaluation": {"num_problems": 2, "every": 1}}
    own = replace(solved(True, False), version=1)
    shown = WrittenMetrics(
        name="metrics.jsonl", version=1, step=1, values={"accuracy": 0.5, "held_out_version": 1}, recorded={}
    )  # fmt: skip
    assert wrong(shown, own, config=config) == []
