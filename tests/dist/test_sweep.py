"""`verifier sweep` as a user calls it: real steps on one and two ranks, out of memory as a row, killed and continued.

What this does not exercise: memory of GPUs (tests/h100/test_sweep_gpu.py).
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.meta.sources import ROOT

WORDS = (
    "--model", "tiny:qwen3", "--mesh", "dp=1", "--mesh", "dp=2", "--mesh", "dp=3,tp=3", "--recompute", "none",
    "--memory-limit", "1.6", "--least-tokens", "2048", "--most-tokens", "32768", "--longest", "128", "--steps", "1",
    "--micro-batches", "1", "--trial-timeout", "60",
)  # fmt: skip

pytestmark = pytest.mark.slow


def started(folder: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "verifier", "sweep", *WORDS, "--run", str(folder), *words]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def lines_of(folder: Path) -> list[str]:
    file = folder / "trials.jsonl"
    return file.read_text().splitlines() if file.exists() else []


@pytest.fixture(scope="module")
def swept(tmp_path_factory) -> tuple[Path, list[str], str]:
    """Folder of a sweep that was killed after two trials and continued, its lines at the kill, and what it printed."""
    folder = tmp_path_factory.mktemp("sweep") / "run"
    first = started(folder)
    give_up_at = time.monotonic() + 120
    while len(lines_of(folder)) < 3 and first.poll() is None and time.monotonic() < give_up_at:
        time.sleep(0.05)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=30)
    with (folder / "trials.jsonl").open("a") as file:
        file.write('{"layout":"1 ra')  # a line that was being written
    before = lines_of(folder)[:-1]
    assert len(before) >= 3
    again = started(folder)
    printed, complained = again.communicate(timeout=300)
    assert again.returncode == 0, complained
    return folder, before, printed


def test_a_killed_sweep_goes_on_where_it_was(swept):
    folder, before, _ = swept
    lines = lines_of(folder)
    assert lines[: len(before)] == before
    rows = [json.loads(line) for line in lines[1:]]
    tried = [(row["layout"], row["max_tokens"]) for row in rows]
    assert len(set(tried)) == len(tried)
    assert {row["layout"] for row in rows} == {"1 rank", "dp2"}


def test_the_largest_budget_is_within_a_tenth_of_one_that_runs_out_of_memory(swept):
    folder, _, printed = swept
    for layout in json.loads((folder / "sweep.json").read_text())["layouts"]:
        largest, beyond = layout["largest_budget"], layout["beyond"]
        assert beyond["status"] == "out_of_memory", beyond
        assert largest["max_tokens"] < beyond["max_tokens"] <= 1.1 * largest["max_tokens"]
        assert largest["peak_bytes"] < 1.6 * 2**30
    assert "largest budget: " in printed


def test_rows_have_speed_and_peak_and_reasons(swept):
    folder, _, _ = swept
    rows = [json.loads(line) for line in lines_of(folder)[1:]]
    for row in rows:
        if row["status"] == "ok":
            assert min(row["tokens_per_s"], row["step_s"], row["peak_bytes"]) > 0
        else:
            assert row["reason"].startswith("rank ")
    assert {row["status"] for row in rows} == {"ok", "out_of_memory"}


def test_an_invalid_layout_is_listed_with_its_reason(swept):
    folder, _, printed = swept
    reason = "tp = 3 does not divide the 8 attention heads of Qwen3ForCausalLM"
    assert [row["reason"] for row in json.loads((folder / "sweep.json").read_text())["invalid"]] == [reason]
    assert f"dp=3,tp=3: {reason}" in printed


def test_the_page_asks_no_network(swept):
    folder, _, _ = swept
    text = (folder / "sweep.html").read_text()
    assert "<script src" not in text
    assert "dp2" in text


def test_a_folder_of_another_sweep_is_refused(swept):
    folder, _, _ = swept
    other = started(folder, "steps=1", "seed=2")
    _, complained = other.communicate(timeout=60)
    assert (other.returncode, complained.strip()) == (
        4,
        "verifier: --steps and steps=1 set the same knob: leave one of the two out",
    )
    other = started(folder, "seed=2")
    _, complained = other.communicate(timeout=60)
    assert other.returncode == 4
    assert "holds a sweep with seed=1, and seed=2 is asked for" in complained
