"""`verifier gate` as a user calls it: killed, its worker killed, continued, violated, waived; the default gate.

What this does not exercise: GPUs, of which each worker gets its own, and several nodes (tests/dist/test_gate_ray.py).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.browser import browser, require_quiet
from tests.meta.sources import ROOT
from tests.processes import alive, arguments, children, said
from verifier.campaign.gate.matrix import SMOKE, fault_cells
from verifier.campaign.gate.run import CellWorker
from verifier.faults.catalog import CATALOG

SMALL = """\
models: [tiny:nemotron-h]
kinds: [golden]
meshes: ["tp=1", "tp=2"]
dtypes: [fp32, bf16]
"""
WAIVER = """\
waivers:
  - check: {check}
    family: nemotron-h
    issue: "miles #975"
    owner: ada
    reason: Megatron-LM rounds the decay rates with the model
    until: 2099-12-31
"""


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "verifier", "gate", *words, "--folder", str(folder)]
    return subprocess.Popen(
        command, cwd=folder.parent, env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def rows_of(folder: Path) -> list[dict[str, Any]]:
    file = folder / "ledger.jsonl"
    text = file.read_text() if file.exists() else ""
    return [json.loads(line)["result"] for line in text.splitlines(keepends=True) if line.endswith("\n")]


def family(pid: int) -> list[int]:
    """A process and all that descend from it."""
    return [pid, *(found for child in children(pid) for found in family(child))]


def the_worker_of(pid: int) -> int:
    """The process that runs the cells of a gate, once it is there."""
    until = time.monotonic() + 60
    while time.monotonic() < until:
        for child in children(pid):
            if "verifier.campaign.gate.cell_runs:serve" in arguments(child):
                return child
        time.sleep(0.05)
    raise AssertionError(f"process {pid} started no worker in 60 s")


def killed_after(process: subprocess.Popen[str], folder: Path, num_rows: int, deadline_s: float) -> None:
    """Kill a gate once its ledger has so many rows and the next cell runs; nothing that it started is left."""
    until = time.monotonic() + deadline_s
    while len(rows_of(folder)) < num_rows:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until
        time.sleep(0.05)
    time.sleep(1.0)
    theirs = family(process.pid)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    gone_at = time.monotonic() + 20
    while any(alive(pid) for pid in theirs):
        assert time.monotonic() < gone_at, [arguments(pid) for pid in theirs if alive(pid)]
        time.sleep(0.1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a gate that was killed after its first cell, while a line was being written."""
    folder = tmp_path_factory.mktemp("small") / "gate"
    (folder.parent / "GATE.yaml").write_text(SMALL)
    killed_after(started(folder, "GATE.yaml"), folder, 1, 120)
    with (folder / "ledger.jsonl").open("a") as file:
        file.write('{"identity":"0f')
    return folder


@pytest.mark.slow
def test_a_killed_gate_goes_on_and_names_a_worker_that_died_and_a_known_bug(folder):
    before = rows_of(folder)
    gate = started(folder, "GATE.yaml", "--json", "out.json", "--junit", "out.xml")
    worker = the_worker_of(gate.pid)
    time.sleep(2.0)
    os.kill(worker, signal.SIGKILL)
    printed, complained = gate.communicate(timeout=200)
    assert (gate.returncode, said(complained)) == (1, "")
    result = json.loads((folder.parent / "out.json").read_text())
    cells = {item["cell"]["id"]: item for item in result["cells"]}
    assert len(cells) == 4
    done = before[0]["cell"]["id"]
    assert cells[done]["began"] == before[0]["began"]  # not run again
    (dead,) = [item for item in result["cells"] if item["status"] == "failed"]
    assert dead["reason"].startswith("its process ended: killed by SIGKILL")
    assert (result["decision"], result["first_bad_stage"]) == ("FAIL", "load")
    bf16 = [item for item in result["cells"] if item["cell"]["dtype"] == "bfloat16" and item["status"] != "failed"]
    assert {item["status"] for item in bf16} == {"violated"}
    assert all("miles #975" in finding["known_bug"] for item in bf16 for finding in item["findings"])
    assert printed.startswith("FAIL: 4 cells: ")
    manifest = json.loads((folder / cells[done]["trace"] / "manifest.json").read_text())
    assert manifest["command_line"] == " ".join(["verifier", "golden", *cells[done]["cell"]["words"]])
    assert (folder.parent / "out.xml").read_text().count("<testcase ") == 4


@pytest.mark.slow
def test_with_its_waivers_the_same_folder_passes_and_runs_the_failed_cell_alone(folder):
    result = json.loads((folder / "result.json").read_text())
    bad = {finding["check"] for item in result["cells"] for finding in item.get("findings", ())} | {"WGT001", "WGT004"}
    (folder.parent / "WAIVED.yaml").write_text(
        SMALL + "".join(WAIVER.format(check=code).removeprefix("waivers:\n" if place else "")
                        for place, code in enumerate(sorted(bad)))
    )  # fmt: skip
    number = len(rows_of(folder))
    gate = started(folder, "WAIVED.yaml")
    printed, complained = gate.communicate(timeout=200)
    assert (gate.returncode, said(complained)) == (0, ""), printed
    assert printed.startswith("PASS: 4 cells: ")
    assert "waiver: WGT001 of family nemotron-h, miles #975, ada: Megatron-LM rounds the decay rates" in printed
    assert "failed in an earlier attempt: " in printed
    assert len(rows_of(folder)) == number + 1


def test_a_budget_that_nothing_fits_is_inconclusive(tmp_path):
    gate = started(tmp_path / "gate", "--model", "tiny:qwen3", "--kind", "golden", "--mesh", "tp=1", "--budget", "0.1")
    printed, complained = gate.communicate(timeout=60)
    assert (gate.returncode, said(complained)) == (2, "")
    assert printed.startswith("INCONCLUSIVE: 2 cells: 2 not run\n")
    assert rows_of(tmp_path / "gate") == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (WAIVER.format(check="WGT999"), "a waiver names check `WGT999`, which there is not: "),
        (WAIVER.format(check="WGT001").replace("nemotron-h", "nemo"), "the waiver of WGT001 names family `nemo`, it "),
        (WAIVER.format(check="WGT001").replace("2099-12-31", "soon"), "the waiver of WGT001 has until `soon`: write"),
    ],
)
def test_a_waiver_of_what_nobody_knows_ends_it_before_anything_starts(tmp_path, text, said):
    (tmp_path / "GATE.yaml").write_text(SMALL + text)
    gate = started(tmp_path / "gate", "GATE.yaml")
    printed, complained = gate.communicate(timeout=60)
    assert (gate.returncode, printed) == (4, "")
    assert complained.startswith(f"verifier: {said}")
    assert complained.count("\n") == 1
    assert not (tmp_path / "gate").exists()


def test_a_worker_that_hangs_makes_a_failed_cell(tmp_path):
    worker = CellWorker([""], tmp_path, "worker")
    worker.begin(fault_cells(())[0], 0.5)
    pid = the_worker_of(os.getpid())
    os.kill(pid, signal.SIGSTOP)
    worker._until = time.monotonic() + 1.0  # without the grace
    result = None
    while result is None:
        assert time.monotonic() < worker._until + 5
        result = worker.turn(print)
        time.sleep(0.1)
    assert (result.status, result.reason) == ("failed", "it did not end within 0.5 s")
    assert not alive(pid)
    worker.close()


@pytest.mark.slow
def test_the_default_gate_killed_twice_is_done_in_25_minutes(tmp_path):
    folder, began = tmp_path / "gate", time.monotonic()
    for num_rows in (4, 9):
        killed_after(started(folder, "--model", "tiny:qwen3-moe"), folder, num_rows, 900)
    page = tmp_path / "page.html"
    gate = started(folder, "--model", "tiny:qwen3-moe", "--html", str(page))
    printed, complained = gate.communicate(timeout=1500)
    assert (gate.returncode, said(complained)) == (0, ""), printed
    assert time.monotonic() - began < 25 * 60
    rows = rows_of(folder)
    assert len({row["cell"]["id"] for row in rows}) == len(rows)
    caught = {row["cell"]["fault"]: row["cell"]["stage"] for row in rows if row["cell"]["kind"] == "faults"}
    assert caught == {name: CATALOG[name].stage.label for name in SMOKE}
    with browser() as tab:
        tab.open(page, width=1200, height=844, scheme="light")
        assert tab.value("document.body.innerText.trim().split('\\n')[0]") == "PASS"
        assert tab.value("document.querySelectorAll('details').length") >= len(rows)
        require_quiet(tab, page)
