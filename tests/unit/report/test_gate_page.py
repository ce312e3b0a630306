"""The page of a gate: decision first, findings led by their roots, waivers, and texts that try to be markup."""

import subprocess
import sys

from msgspec.structs import replace

from tests.meta.sources import ROOT
from tests.unit.campaign.gate_cases import finding, violated
from tests.unit.campaign.test_gate_data import made
from tests.unit.report.pages import HOSTILE, hostile, parsed
from verifier.core.outputs import json_text
from verifier.report.pages import page_of_gate
from verifier.report.render_html import html


def test_the_decision_stands_first_and_a_root_before_its_consequences():
    found = parsed(html(page_of_gate(made())))
    text = found.text
    body = text[text.index("FAIL", text.index("FAIL") + 1) :]  # after the title
    assert body.startswith("FAIL gate tiny:nemotron-h 6 cells: 1 violated, 1 waived, 1 holds, 1 not run")
    assert body.index("first bad stage: load") < body.index("Findings, the first in the flow of data first")
    root = body.index("WGT001 tensor-differs: 6 of 40", body.index("Findings,"))
    assert root < body.index("1 after it in the flow of data") < body.index("ENG001 tensor-differs", root)
    assert "dead, 1" in body[root:]


def test_every_waiver_has_owner_reason_day_and_what_came_of_it():
    page = page_of_gate(made())
    assert [(item.owner, item.until, item.came.partition(",")[0]) for item in page.waivers] == [
        ("ada", "2027-01-31", "waives 1"),
        ("ada", "2027-01-31", "matched nothing: remove it if what it waives is mended"),
        ("ada", "2026-01-01", "EXPIRED"),
    ]
    assert "decays are rounded upstream" in parsed(html(page)).text


def test_a_finding_has_the_line_that_replays_it():
    result = made()
    cell = violated(replace(finding(), trace="traces/a b"))
    page = page_of_gate(replace(result, cells=(cell,)))
    assert page.roots[0].replay == "verifier replay 'gates/x-0001/traces/a b' --check WGT001"
    assert page.roots[0].place == cell.cell.id


def test_a_fault_that_was_not_caught_and_a_run_that_died_are_findings():
    result = made()
    missed = replace(result.cells[2], status="violated", reason="not caught: TRN001 holds")
    page = page_of_gate(replace(result, cells=(missed, result.cells[4])))
    assert [item.title for item in page.roots] == ["not caught: TRN001 holds", "its process ended: exit status 7"]


def test_no_text_becomes_markup():
    text = html(page_of_gate(hostile()))
    found = parsed(text)
    assert found.tags.count("h1") == 1
    assert HOSTILE[:-6] in "".join(found.texts)
    assert "\\x1b[31m\\u202e" in text


def test_a_page_needs_no_torch(tmp_path):
    result = tmp_path / "gate.json"
    result.write_text(json_text(made()))
    code = "import sys; from verifier.cli.app import run; code = run(sys.argv[1:]); "
    code += "sys.exit(code or 7 * bool({'torch', 'transformers', 'ray', 'vllm', 'megatron'} & set(sys.modules)))"
    page = tmp_path / "page.html"
    done = subprocess.run(
        [sys.executable, "-c", code, "report", "html", str(result), str(page)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    parsed(page.read_text())
