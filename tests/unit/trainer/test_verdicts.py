"""Verdicts: awaited in order, counted, and before an error that a violation may be the cause of."""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

from verifier.errors import ContractError, InternalError, ViolationFound
from verifier.trainer import verdicts
from verifier.trainer.verdicts import Judged, Verdicts, require_held


class GivenJudge:
    """Gives exit codes by the trace's name; none for an unknown one."""

    def __init__(self, **codes: int) -> None:
        self._codes = codes

    def submit(self, trace: Path) -> Future[Judged]:
        found: Future[Judged] = Future()
        if trace.name in self._codes:
            found.set_result(Judged(self._codes[trace.name], f"report of {trace.name}"))
        return found


class Told:
    """Metrics that only listen."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def judged(self, step: int, exit_code: int) -> None:
        self.found.append((step, exit_code))


def asked(**codes: int) -> Verdicts:
    found = Verdicts(judge=GivenJudge(**codes), metrics=Told())  # type: ignore[arg-type]
    for step, name in enumerate(codes, start=1):
        found.ask(step, Path(name))
    return found


def test_steps_are_settled_up_to_one_and_counted() -> None:
    found = asked(one=0, two=0, three=1)
    found.settle(0)
    assert found.num_judged == 0
    found.settle(2)
    assert found.num_judged == 2
    with pytest.raises(ViolationFound, match="report of three"):
        found.settle(3)
    assert found.metrics.found == [(1, 0), (2, 0), (3, 1)]  # type: ignore[attr-defined]
    Verdicts(judge=None, metrics=Told()).settle(9)  # type: ignore[arg-type]


def test_a_violation_goes_before_an_error_that_came_after_it() -> None:
    found = asked(one=1)
    with pytest.raises(ViolationFound, match="report of one") as raised, found.first(1):
        raise ContractError("the engine answers nothing")
    assert isinstance(raised.value.__context__, ContractError)


def test_an_error_stays_where_all_holds() -> None:
    found = asked(one=0, two=1)
    with pytest.raises(ContractError, match="the engine answers nothing"), found.first(1):
        raise ContractError("the engine answers nothing")
    with found.first(2):
        pass
    assert found.num_judged == 1


def test_a_judge_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "DEADLINE_S", 0.01)
    with pytest.raises(InternalError, match=r"the judge of the export did not answer in 0\.01 s"):
        require_held(GivenJudge(), Path("unknown"), "the export")
    with pytest.raises(ViolationFound):
        require_held(GivenJudge(one=1), Path("one"), "the export")
    require_held(GivenJudge(one=0), Path("one"), "the export")
