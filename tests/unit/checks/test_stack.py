"""The check of a run that the stack ended: its hint, and what a report makes of the checks that it left without one."""

import json
from xml.etree import ElementTree

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.manifest import Facts, Manifest, MeshSizes
from verifier.core.trace import Trace
from verifier.report import render_json, render_junit, render_text, report_of
from verifier.stages.load.records import SourceTensor, StackFailure

FAILURE = {
    "package": "megatron-bridge", "package_version": "0.6.2", "file": "megatron/bridge/x.py", "line": 9,
    "function": "f", "message": "RuntimeError: no", "at": "logprob", "during": 1,
}  # fmt: skip
TP2 = Manifest(
    command="golden", layout="x", facts=Facts(stack_failed=True), mesh=MeshSizes(tp=2), world_size=2, engine="vllm",
    engine_ranks=1,
)  # fmt: skip


@pytest.mark.parametrize(
    ("party", "manifest", "more", "hint"),
    [
        ("trainer rank 1", TP2, {}, "try --tp 1: that tells whether it belongs to the mesh"),
        ("trainer rank 1", Manifest(mesh=MeshSizes(dp=2), world_size=2), {}, ""),
        ("trainer rank 0", Manifest(mesh=MeshSizes(), world_size=1), {}, "the trainer had one rank"),
        ("the engine", TP2, {}, "no mesh of the trainer changes it; try --engine hf"),
        ("trainer rank 1", TP2, {"missing": "fla"}, "no mesh changes it: install what provides `fla`"),
        ("trainer rank 1", TP2, {"message": "ImportError: FLA"}, "no mesh changes it: install the package"),
        ("trainer rank 1", TP2, {"stand_in": "verifier/platform/cpu_modules.py:5"}, "it came out of a stand-in"),
    ],
)
def test_hint(party, manifest, more, hint):
    outcome = run_check(REGISTRY["STK001"], Trace(manifest, [StackFailure(name=party, **FAILURE | more)]))
    assert outcome.finding is not None
    assert outcome.finding.first.hint.startswith(hint)
    assert bool(outcome.finding.first.hint) == bool(hint)


def test_what_the_end_left_out_is_one_line_in_every_form():
    source = SourceTensor(name="a", digest="vd1:" + "0" * 32, dtype="float32", shape=())
    report = report_of(Trace(TP2, [source, StackFailure(name="trainer rank 1", **FAILURE)]), "t")
    line = f"{len(report.unreached)} checks were not judged: the run ended in stage logprob"
    assert "WGT004" in report.unreached
    assert [item.code for item in report.outcomes] == ["STK001"]
    text = render_text(report)
    assert text.count(line) == 1
    assert "INCONCLUSIVE" not in text
    found = json.loads(render_json(report))
    assert found["not_judged"] == [line]
    assert found["unreached"] == list(report.unreached)
    assert [item["code"] for item in found["outcomes"]] == ["STK001"]
    suite = ElementTree.fromstring(render_junit(report))
    assert (suite.get("tests"), suite.get("failures"), suite.get("errors")) == ("2", "1", "0")
    assert suite.get("skipped") == "1"
    assert [item.get("message") for item in suite.iter("skipped")] == [line]
    assert int(report.exit_code) == 1


def test_a_run_that_ended_otherwise_says_each_check():
    report = report_of(Trace(Manifest(command="golden"), []), "t")
    assert not report.unreached
    assert "STK001" not in report.out_of_scope
    assert render_text(report).count("INCONCLUSIVE") > 1
