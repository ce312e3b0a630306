"""A gate's result as text, JSON, JUnit and annotations, from one made-up result; budget and deadline of cells."""

from __future__ import annotations

import datetime
from xml.etree import ElementTree

import msgspec
from msgspec.structs import replace

from tests.unit.campaign.gate_cases import CELL, FAULT, finding, violated, waiver
from verifier.campaign.gate.decision import decided, waived
from verifier.campaign.gate.run import _fits, _not_run
from verifier.config import GateConfig
from verifier.core.outputs import json_text
from verifier.report.gate_result import CellResult, GateResult, LeftOut, render_gate
from verifier.report.render_junit import gate_junit, github_annotations

CELLS = (
    violated(finding(), finding("ENG001", "engine", (0, 1, 13)), trace="traces/a"),
    violated(cell=replace(CELL, id="waived one", model="tiny:nemotron-h"), findings=(finding("WGT004", "export"),)),
    CellResult(cell=FAULT, status="holds", reason="caught in train by TRN001", seconds=14.0),
    CellResult(cell=replace(CELL, id="golden tiny:nemotron-h bf16 tp2"), status="not run", reason="no budget is left"),
    CellResult(cell=replace(CELL, id="dead, 1"), status="failed", reason="its process ended: exit status 7\nlast: 50%"),
    CellResult(cell=replace(CELL, id="unsure"), status="inconclusive", reason="LGP001 x: nothing was recorded",
               failed_before=("it did not end within 900 s",)),
)  # fmt: skip


def made() -> GateResult:
    waivers = (waiver(check="WGT004"), waiver(check="PLN002"), waiver(until="2026-01-01"))
    cells, uses = waived(CELLS, waivers, datetime.date(2026, 11, 26))
    decision, reasons, stage = decided(cells, uses)
    return GateResult(
        decision=decision, reasons=tuple(reasons), first_bad_stage=stage, began="2026-11-26T10:00:00Z",
        ended="2026-11-26T10:20:00Z", host="Linux x86_64, 2 processors", tier="cpu", gpus=(), verifier="0.1.0",
        commit="abc1234", versions={"torch": "2.11.0"}, fixes=(), models=("tiny:nemotron-h",), budget_minutes=1.0,
        seconds=51.5, folder="gates/x-0001", cells=tuple(cells),
        left_out=(LeftOut(what="mesh tp3", reason="tp = 3 does not divide"),), waivers=tuple(uses),
    )  # fmt: skip


def test_text():
    text = render_gate(made())
    lines = text.splitlines()
    assert lines[0] == "FAIL: 6 cells: 1 violated, 1 waived, 1 holds, 1 not run, 1 failed, 1 inconclusive"
    assert lines[1] == "first bad stage: load"
    assert lines[-1].startswith(f"FAIL: {CELL.id} is violated, first in load: WGT001 tensor-differs")
    root = text.index("  WGT001 tensor-differs: 6 of 40 tensors differ\n")
    assert root < text.index("after it in the flow of data") < text.index("ENG001 tensor-differs", root)
    assert "failed in an earlier attempt: unsure: it did not end within 900 s\n" in text
    assert "left out: mesh tp3: tp = 3 does not divide\n" in text
    assert [line.partition("until ")[2] for line in lines if line.startswith("waiver: ")] == [
        "2027-01-31; waives 1",
        "2027-01-31; matched nothing: remove it if what it waives is mended",
        "2026-01-01; EXPIRED, it waives nothing, 1 would fall under it",
    ]


def test_json_comes_back():
    assert msgspec.json.decode(json_text(made()), type=GateResult) == made()


def test_junit_has_a_case_per_cell_with_its_time():
    suite = ElementTree.fromstring(gate_junit(made()))
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped", "time")} == {
        "tests": "6", "failures": "2", "errors": "1", "skipped": "1", "time": "51.5",
    }  # fmt: skip
    kinds = {case.get("name"): [child.tag for child in case] for case in suite.iter("testcase")}
    assert kinds == {
        CELL.id: ["failure"], "waived one": ["system-out"], "faults step-dropped": [],
        "golden tiny:nemotron-h bf16 tp2": ["skipped"], "dead, 1": ["failure"], "unsure": ["error"],
    }  # fmt: skip
    assert next(suite.iter("testcase")).get("time") == "12.5"


def test_annotations():
    said = github_annotations(made()).splitlines()
    assert said[0].startswith("::error title=roundtrip tiny%3Anemotron-h bf16 1-rank hf::WGT001 tensor-differs: 6 of")
    assert "::error title=dead%2C 1::its process ended: exit status 7" in said
    assert [line.partition(" ")[0] for line in said] == [
        "::error", "::warning", "::error", "::warning", "::warning", "::warning",
    ]  # fmt: skip


def test_a_budget_counts_earlier_attempts_and_the_deadline_does_not():
    config = GateConfig(models=("tiny:qwen3",), budget_minutes=2.0, timeout_s=100.0)
    assert _fits(config, 30.0, 60.0, 30.0)
    assert not _fits(config, 30.0, 60.0, 31.0)
    assert not _fits(config, 100.0, 0.0, 1.0)
    assert _not_run(config, CELL).reason == "it does not fit into the budget of 2 minutes"
    assert _not_run(GateConfig(models=("x",), timeout_s=9.0), CELL).reason == "the deadline of 9 s had passed"
