"""`verifier sweep` on one GPU: the largest budget of a model of published width, up to out of memory, in 5 minutes."""

from __future__ import annotations

import json
import subprocess
import sys
import time

import pytest

from tests.meta.sources import ROOT

pytestmark = [pytest.mark.h100(gpus=1), pytest.mark.own_gpus]

MODEL = "wide:qwen3-30b-a3b"
LONGEST_S = 300.0


def test_the_largest_budget_is_found_in_five_minutes(measured, tmp_path):
    command = [sys.executable, "-m", "verifier", "sweep", "--model", MODEL, "--run", str(tmp_path / "run")]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    seconds = time.monotonic() - began
    assert done.returncode == 0, done.stderr + done.stdout
    summary = json.loads((tmp_path / "run" / "sweep.json").read_text())
    lines = (tmp_path / "run" / "trials.jsonl").read_text().splitlines()
    measured(
        model=MODEL, seconds=round(seconds, 1), trials=len(lines) - 1,
        largest=summary["largest_budget"]["max_tokens"], fastest=round(summary["fastest"]["tokens_per_s"]),
        peak_gib=round(summary["largest_budget"]["peak_bytes"] / 2**30, 1),
    )  # fmt: skip
    assert {item["layout"] for item in summary["layouts"]} == {"1 rank", "1 rank, recompute full"}
    for layout in summary["layouts"]:
        largest, beyond = layout["largest_budget"], layout["beyond"]
        assert beyond["status"] == "out_of_memory", beyond
        assert largest["max_tokens"] < beyond["max_tokens"] <= 1.1 * largest["max_tokens"]
    assert seconds < LONGEST_S
