"""Numbers of an evaluation by MET003: what they are a mean of, and which problems count as solved.

What this does not exercise: real runs (tests/dist/test_train_clean.py), and bugs that MET003 catches (tests/faults).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from verifier.checks.evaluation_numbers import evaluation_misreported
from verifier.checks.policy_step import reward_differs_from_second_reader
from verifier.core.manifest import Manifest
from verifier.core.record import Real, Record
from verifier.core.records_policy import GivenRewards, SolvedProblems, WrittenMetrics
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
