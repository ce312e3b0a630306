"""Verdicts: awaited in order, counted, and before an error that a violation may be the cause of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import pytest

from verifier.core import store
from verifier.core.manifest import Manifest
from verifier.core.reader import has_evidence
from verifier.errors import ContractError, InternalError, UsageError, ViolationFound
from verifier.probes.training import verdicts
from verifier.probes.training.run_evidence import RunEvidence
from verifier.probes.training.verdicts import Judged, Suspicions, Verdicts, require_held


class GivenJudge:
    """Gives exit codes, or whole verdicts, by the trace's name; none for an unknown one."""

    def __init__(self, **codes: int | Judged) -> None:
        self._codes = codes

    def submit(self, trace: Path) -> Future[Judged]:
        found: Future[Judged] = Future()
        if trace.name in self._codes:
            code = self._codes[trace.name]
            found.set_result(code if isinstance(code, Judged) else Judged(code, f"report of {trace.name}"))
        return found

    def pack(self, trace: Path, *, records: bool = True) -> None:
        if trace.exists():
            store.pack(trace, records=records)


class Told:
    """Metrics that only listen."""

    def __init__(self) -> None:
        self.found: list[tuple[int, int]] = []

    def judged(self, step: int, exit_code: int, suspected: Iterable[str] = ()) -> None:
        self.found.append((step, exit_code))
        self.signs = [*suspected]


SUSPECTED = Judged(
    1, "report\n", {"ABC001": "ABC001 a-b: 1.3 times its bound"}, frozenset({"ABC001"}), frozenset({"ABC001"})
)
"""Verdict on a step that one check suspects."""
WITHIN = Judged(0, "", computed=frozenset({"ABC001"}))
"""Verdict on a step that the same check holds for."""
BITWISE = Judged(1, "report of a fault\n", mismatched=frozenset({"XYZ001"}))
"""Verdict on a step that another check is violated by."""


def asked(folder: Path, **codes: int | Judged) -> Verdicts:
    said: list[str] = []
    found = Verdicts(
        judge=GivenJudge(**codes), metrics=Told(), tell=said.append,  # type: ignore[arg-type]
        suspicions=Suspicions(folder / "suspected.json", 9),
    )  # fmt: skip
    for step, name in enumerate(codes, start=1):
        found.ask(step, Path(name))
    return found


def test_steps_are_settled_up_to_one_and_counted(tmp_path: Path) -> None:
    found = asked(tmp_path, one=0, two=0, three=1)
    found.settle(0)
    assert found.num_judged == 0
    found.settle(2)
    assert found.num_judged == 2
    with pytest.raises(ViolationFound, match="report of three"):
        found.settle(3)
    assert found.metrics.found == [(1, 0), (2, 0), (3, 1)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("keep", "left"), [(None, "abcde"), (2, "bde"), (0, "b")])
def test_records_of_steps_that_hold_go_but_for_the_last_ones(tmp_path: Path, keep: int | None, left: str) -> None:
    """Step b is suspected, and stays; a is of the run before."""
    traces = {name: store.create(tmp_path / name, Manifest()) for name in "abcde"}
    for trace in traces.values():
        with contextlib.closing(store.Recorder(trace, "controller", 0)):
            pass
        store.complete(trace, Manifest(command="train"))
    found = asked(tmp_path)
    found.judge, found.keep = GivenJudge(b=SUSPECTED, c=0, d=WITHIN, e=0), keep
    found.held.append(traces["a"])
    for step, name in enumerate("bcde", start=2):
        found.ask(step, traces[name])
    found.settle(5)
    assert [name for name in "abcde" if has_evidence(traces[name])] == list(left)
    assert [name for name in "abcde" if (traces[name] / "evidence").is_dir()] == [name for name in left if name in "ab"]
    for name in "abcde":
        if name in left:
            assert store.read(traces[name]).manifest.complete
        else:
            with pytest.raises(UsageError, match=r"were removed \(verify\.keep\), its digests are kept"):
                store.read(traces[name])


def blaming(found: Verdicts, until: int) -> contextlib.AbstractContextManager[None]:
    evidence = RunEvidence(found.judge)
    evidence._verdicts = found
    return evidence.blaming(until)


def test_a_violation_goes_before_an_error_that_came_after_it(tmp_path: Path) -> None:
    found = asked(tmp_path, one=1)
    with pytest.raises(ViolationFound, match="report of one") as raised, blaming(found, 1):
        raise ContractError("the engine answers nothing")
    assert isinstance(raised.value.__context__, ContractError)


def test_an_error_stays_where_all_holds(tmp_path: Path) -> None:
    found = asked(tmp_path, one=0, two=1)
    with pytest.raises(ContractError, match="the engine answers nothing"), blaming(found, 1):
        raise ContractError("the engine answers nothing")
    with blaming(found, 2):
        pass
    assert found.num_judged == 1


def test_a_judge_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdicts, "DEADLINE_S", 0.01)
    with pytest.raises(InternalError, match=r"the judge of the export did not answer in 0\.01 s"):
        require_held(GivenJudge(), Path("unknown"), "the export")
    with pytest.raises(ViolationFound):
        require_held(GivenJudge(one=1), Path("one"), "the export")
    require_held(GivenJudge(one=0), Path("one"), "the export")


def test_a_suspicion_is_confirmed_by_the_next_step_that_the_check_judges(tmp_path: Path) -> None:
    found = asked(tmp_path, one=SUSPECTED, two=0, three=SUSPECTED)
    found.settle(2)
    assert found.metrics.signs == []  # type: ignore[attr-defined]
    assert found.suspicions.open["ABC001"].step == 1  # step 2 compared nothing of it
    with pytest.raises(ViolationFound, match=r"confirmed: step 1 .*`one`.*step 3 is beyond the bound again") as raised:
        found.settle(3)
    assert raised.value.exit_code == 1


def test_a_suspicion_is_dropped_by_a_step_within_the_bound(tmp_path: Path) -> None:
    found = asked(tmp_path, one=SUSPECTED, two=WITHIN)
    found.settle(1)
    assert found.metrics.signs == ["ABC001 a-b: 1.3 times its bound"]  # type: ignore[attr-defined]
    found.settle(2)
    assert (found.suspicions.open, found.suspicions.num_dropped, found.num_judged) == ({}, 1, 2)
    assert Suspicions(tmp_path / "suspected.json", 9).steps == {1}  # a resumed run keeps its trace too


@pytest.mark.parametrize("after", [BITWISE, Judged(2, "could not tell")], ids=["violated", "inconclusive"])
def test_what_is_no_suspicion_ends_the_run_at_once(after: Judged, tmp_path: Path) -> None:
    found = asked(tmp_path, one=SUSPECTED, two=after)
    with pytest.raises(ViolationFound, match=after.text.strip()) as raised:
        found.settle(2)
    assert raised.value.exit_code == after.exit_code
    assert "confirmed" not in str(raised.value)


def test_a_resumed_run_keeps_the_suspicions_of_the_steps_that_it_has(tmp_path: Path) -> None:
    found = asked(tmp_path, one=WITHIN, two=SUSPECTED)
    found.settle(2)
    file = tmp_path / "suspected.json"
    assert [*Suspicions(file, 2).open] == ["ABC001"]
    assert not Suspicions(file, 1).open
