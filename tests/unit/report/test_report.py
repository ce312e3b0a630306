"""From a trace to a report: which checks run, what is left out, and what a replay restricts."""

import unicodedata
from collections.abc import Iterator
from xml.etree import ElementTree

import pytest
from msgspec.structs import replace

from verifier.core.check import Check
from verifier.core.comparison import Comparison
from verifier.core.condition import ALWAYS, on
from verifier.core.finding import ExitCode, Verdict
from verifier.core.manifest import Manifest, MeshSizes
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.report import render_junit, render_text, report_of
from verifier.stages.export.records import ExportedTensor


def dtypes_are_a(trace: Trace) -> Iterator[Comparison]:
    """Every dtype is "a"."""
    for item in trace.of(ExportedTensor):
        yield Comparison(what=item.name, same=item.dtype == "a", stage=Stage.EXPORT, version=item.version)


def make_check(code: str, part: str) -> Check:
    return Check(
        code=code, name="dtype-is-not-a", needs=(ExportedTensor,), applies=on(**{part: ALWAYS}), fn=dtypes_are_a
    )


CHECKS = {
    code: make_check(code, part) for code, part in (("AAA001", "golden"), ("AAA002", "golden"), ("BBB001", "loop"))
}


def make_trace(*dtypes: str, command: str = "golden", complete: bool = True) -> Trace:
    records = [
        ExportedTensor(name=f"layer.{index}", digest="vd1:" + "0" * 32, dtype=dtype, shape=())
        for index, dtype in enumerate(dtypes)
    ]
    return Trace(Manifest(command=command, complete=complete), records)


def test_runs_the_checks_that_say_they_judge_the_run():
    report = report_of(make_trace("a", "a"), "t", checks=CHECKS)
    assert [item.code for item in report.outcomes] == ["AAA001", "AAA002"]
    assert report.out_of_scope == {"BBB001": "nothing of it in a golden run"}
    assert report.switched_off == ()
    assert (report.verdict, report.exit_code) == (Verdict.HOLDS, ExitCode.HOLDS)


def test_one_difference_is_a_violation():
    report = report_of(make_trace("a", "b"), "t", checks=CHECKS)
    assert (report.verdict, report.exit_code) == (Verdict.VIOLATED, ExitCode.VIOLATED)


def test_nothing_recorded_is_inconclusive():
    report = report_of(make_trace(), "t", checks=CHECKS)
    assert report.outcomes[0].not_recorded == ("export/tensor",)
    assert (report.verdict, report.exit_code) == (Verdict.INCONCLUSIVE, ExitCode.INCONCLUSIVE)


def test_a_run_that_no_check_judges_is_inconclusive():
    assert report_of(make_trace("a", command="bisect"), "t", checks=CHECKS).exit_code is ExitCode.INCONCLUSIVE


def test_unfinished_run_never_holds_but_may_violate():
    assert report_of(make_trace("a", complete=False), "t", checks=CHECKS).exit_code is ExitCode.INCONCLUSIVE
    assert report_of(make_trace("b", complete=False), "t", checks=CHECKS).exit_code is ExitCode.VIOLATED


def test_only_some_codes_says_what_was_switched_off():
    report = report_of(make_trace("a"), "t", checks=CHECKS, only_codes=["AAA002"])
    assert [item.code for item in report.outcomes] == ["AAA002"]
    assert report.switched_off == ("AAA001",)
    assert "switched off: AAA001" in render_text(report)


def test_only_some_names_compares_only_those():
    report = report_of(make_trace("a", "b", "a"), "t", checks=CHECKS, only_names="layer.1")
    assert [item.num_compared for item in report.outcomes] == [1, 1]
    assert report.outcomes[0].finding.first.what == "layer.1"


def test_restriction_to_an_absent_name_is_inconclusive():
    assert report_of(make_trace("a"), "t", checks=CHECKS, only_names="zzz").exit_code is ExitCode.INCONCLUSIVE


@pytest.mark.parametrize("complete", [True, False])
def test_text_is_a_pure_function_of_the_trace(complete):
    traces = [make_trace("a", "b", complete=complete) for _ in range(2)]
    first, second = (render_text(report_of(trace, "t", checks=CHECKS)) for trace in traces)
    assert first == second


def test_a_cause_stands_before_its_consequences():
    def early(trace: Trace) -> Iterator[Comparison]:
        yield Comparison(what="w", same=False, stage=Stage.LOAD, version=0, sentence="cause")

    def late(trace: Trace) -> Iterator[Comparison]:
        yield Comparison(what="w", same=False, stage=Stage.ENGINE, version=1, sentence="consequence")

    checks = {code: Check(code=code, name="x", needs=(), fn=fn) for code, fn in (("A001", late), ("B001", early))}
    text = render_text(report_of(make_trace("a"), "t", checks=checks))
    assert text.index("B001 x: cause") < text.index("A001 x: consequence")
    assert "first bad stage: load, version 0" in text


@pytest.mark.parametrize(
    ("gpus", "said"), [(0, "(4 ranks)"), (1, "(4 ranks on 1 GPU)"), (3, "(4 ranks on 3 GPUs)"), (4, "(4 ranks)")]
)
def test_the_report_says_when_ranks_share_gpus(gpus, said):
    trace = Trace(Manifest(mesh=MeshSizes(tp=2, pp=2), world_size=4, num_gpus=gpus), [])
    assert render_text(report_of(trace, "t", checks=CHECKS)).splitlines()[0] == f"verifier run on tp2 pp2 {said}"


STEERING = "a\x1b[31mb\nc\rd\x00e\u202ef\u2066g\u2028h\x85i\ufffe"
"""Colours, line breaks, directions of text, and what XML cannot hold."""


@pytest.mark.parametrize("complete", [True, False])
def test_nothing_in_a_trace_steers_the_terminal_or_breaks_a_line(complete):
    plain, evil = (
        Trace(
            Manifest(
                command=text, config={"model": text, "dtype": text}, tier=text, versions={text: text},
                stand_ins=(text,), complete=complete, failure="" if complete else f"x {text}:",
            ),
            [replace(item, name=text, dtype=text) for item in make_trace("b", "b").records],
        )
        for text in ("plain", STEERING)
    )  # fmt: skip

    def tells(trace: Trace) -> Iterator[Comparison]:
        for item in trace.of(ExportedTensor):
            yield Comparison(
                what=item.name, same=False, stage=Stage.EXPORT, version=0, sentence=f"`{item.name}` is wrong",
                owner=item.name, expected=item.name, actual=item.name, mismatched=item.name, allowed=item.name,
                hint=item.name,
            )  # fmt: skip

    def breaks(trace: Trace) -> Iterator[Comparison]:
        raise ValueError(next(trace.of(ExportedTensor)).name)

    checks = {code: Check(code=code, name="x", needs=(), fn=fn) for code, fn in (("A001", tells), ("B001", breaks))}
    reports = [report_of(trace, trace.manifest.tier, checks=checks) for trace in (plain, evil)]
    lines, found = (render_text(report).split("\n") for report in reports)
    assert len(found) == len(lines)
    assert all(unicodedata.category(letter)[0] != "C" for line in found for letter in line)
    assert any(r"a\x1b[31mb\nc\rd\x00e\u202ef\u2066g\u2028h\x85i\ufffe" in line for line in found)
    junit = render_junit(reports[1])
    assert all(letter == "\n" or unicodedata.category(letter)[0] != "C" for letter in junit)
    assert len(ElementTree.fromstring(junit).findall("testcase")) == 2
