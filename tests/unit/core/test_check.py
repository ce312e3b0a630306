"""A verdict is derived: no check can pass on nothing, on half of its evidence, or by breaking."""

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import Check, check, run_check
from verifier.core.comparison import Comparison
from verifier.core.condition import ALWAYS
from verifier.core.finding import ExitCode, Verdict, verdict_of
from verifier.core.manifest import Manifest, MovedContract
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.stages.checks_content import compare_contents
from verifier.stages.export.records import ExportedTensor
from verifier.stages.load.records import SourceTensor
from verifier.stages.plan.records import PlanDigest
from verifier.stages.train.records import Update

TENSOR = {"digest": "vd1:" + "0" * 32, "dtype": "float32", "shape": (2,)}
TRACE = Trace(Manifest(), [ExportedTensor(name="a", **TENSOR)])


def compared(name: str, *, same: bool = False, stage: Stage = Stage.ENGINE, version: int = 0, badness: float = 0.5):
    return Comparison(what=name, same=same, stage=stage, version=version, badness=0.0 if same else badness)


def outcome_of(*comparisons: Comparison, then: Exception | None = None, needs=(ExportedTensor,)):
    def judge(trace: Trace):
        yield from comparisons
        if then is not None:
            raise then

    return run_check(Check(code="ABC001", name="a-b", needs=needs, fn=judge), TRACE)


@pytest.mark.parametrize(
    ("outcome", "verdict", "code"),
    [
        (outcome_of(compared("a", same=True)), Verdict.HOLDS, ExitCode.HOLDS),
        (outcome_of(compared("a", same=True), compared("b")), Verdict.VIOLATED, ExitCode.VIOLATED),
        (outcome_of(), Verdict.INCONCLUSIVE, ExitCode.INCONCLUSIVE),
        (outcome_of(compared("a", same=True), then=KeyError("x")), Verdict.INCONCLUSIVE, ExitCode.INCONCLUSIVE),
        (outcome_of(compared("a"), then=KeyError("x")), Verdict.VIOLATED, ExitCode.VIOLATED),
        (
            outcome_of(compared("a", same=True), needs=(PlanDigest,)),
            Verdict.INCONCLUSIVE,
            ExitCode.INCONCLUSIVE,
        ),
    ],
    ids=["holds", "violated", "nothing-compared", "broke", "broke-after-a-mismatch", "not-recorded"],
)
def test_verdict(outcome, verdict, code):
    assert (outcome.verdict, verdict_of([outcome]).exit_code) == (verdict, code)


@pytest.mark.parametrize(
    ("complete", "last", "verdict"),
    [
        (True, 0, Verdict.VIOLATED), (False, 0, Verdict.INCONCLUSIVE), (False, 1, Verdict.VIOLATED),
    ],
)  # fmt: skip
def test_what_a_broken_run_did_not_reach_is_no_mismatch(complete, last, verdict):
    """The export of version 0 lacks a tensor; a run that went on to version 1 had had its time to export it."""
    source, exported = SourceTensor(name="a", **TENSOR), ExportedTensor(name="a", **TENSOR)

    def judge(trace: Trace):
        yield from compare_contents([], [source], ("the export", "the source"), Stage.EXPORT)

    item = Check(code="ABC001", name="a-b", needs=(ExportedTensor,), fn=judge)
    later = Update(name="step", version=last, how="step")
    assert run_check(item, Trace(Manifest(complete=complete), [exported, later])).verdict is verdict


def test_what_a_broken_run_shows_to_differ_is_a_mismatch():
    item = Check(
        code="ABC001", name="a-b", needs=(ExportedTensor,),
        fn=lambda trace: iter([compared("a"), compared("b", same=True)]),
    )  # fmt: skip
    assert run_check(item, Trace(Manifest(), TRACE.records)).verdict is Verdict.VIOLATED


@pytest.mark.parametrize(
    ("code", "same", "verdict"),
    [
        ("ABC001", True, Verdict.INCONCLUSIVE), ("ABC001", False, Verdict.VIOLATED), ("ABC002", True, Verdict.HOLDS),
    ],
)  # fmt: skip
def test_no_check_holds_that_rests_on_a_moved_contract(code, same, verdict):
    moved = MovedContract(name="ranks_are_laid_out", package="megatron-core", why="x.py:1: Error", checks=("ABC001",))
    trace = Trace(Manifest(moved_contracts=(moved,)), TRACE.records)
    item = Check(code=code, name="a-b", needs=(ExportedTensor,), fn=lambda _: iter([compared("a", same=same)]))
    outcome = run_check(item, trace)
    assert outcome.verdict is verdict
    assert outcome.moved == (("ranks_are_laid_out of megatron-core",) if code == "ABC001" else ())


def test_no_outcome_at_all_is_inconclusive():
    assert verdict_of([]).exit_code is ExitCode.INCONCLUSIVE


def test_the_first_bad_stage_is_the_earliest_by_version_and_then_by_stage():
    finding = outcome_of(
        compared("late", stage=Stage.LOAD, version=2),
        compared("first", stage=Stage.EXPORT, version=1),
        compared("worst", stage=Stage.ENGINE, version=1, badness=1.0),
    ).finding
    assert (finding.count, finding.first_bad_stage) == (3, Stage.EXPORT)
    assert (finding.first.what, finding.worst.what, finding.last.what) == ("first", "worst", "late")
    assert [item.what for item in finding.bad] == ["first", "worst", "late"]


def test_a_later_version_begins_with_the_update_that_made_it():
    order = [
        compared("scored at 0", stage=Stage.LOGPROB, version=0),
        compared("idle step", stage=Stage.TRAIN, version=0),
        compared("gradient", stage=Stage.LOSS, version=1),
        compared("step", stage=Stage.TRAIN, version=1),
        compared("scored at 1", stage=Stage.LOGPROB, version=1),
        compared("export", stage=Stage.EXPORT, version=1),
    ]
    assert list(outcome_of(*reversed(order)).finding.bad) == order


def test_a_code_is_given_once_and_not_without_a_page():
    with pytest.raises(ValueError, match="check code WGT001 is taken by `loaded-shard-differs`"):
        check("WGT001", needs=(), applies=ALWAYS)(lambda trace: iter(()))
    with pytest.raises(ValueError, match="check ABC001 has no page: write the docstring first"):
        check("ABC001", needs=(), applies=ALWAYS)(lambda trace: iter(()))
