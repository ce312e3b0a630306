"""Commands on checkpoints with a layer for further tokens (MTP), as published for DeepSeek-V3 and GLM-4.5: all hold.

What this does not exercise: the layer's own loss, which no run trains; vLLM on a GPU.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.test_roundtrip import ROOT, command

pytestmark = pytest.mark.slow

ON_STAGES = ("--pp", "2")
NOTE = "tensors of layers that predict further tokens (MTP) are exported and not served"
JUDGED = ("LSS001", "TRN001", "WGT001", "WGT002")
KNOBS = (
    "algorithm=sft",
    "data.source=arithmetic",
    "data.batch_size=8",
    "batch.max_tokens=512",
    "steps=2",
    "verify.every=2",
    "optimizer.weight_decay=0.1",
)


@pytest.mark.parametrize("model", ["tiny:glm4_moe-mtp", "tiny:deepseek_v3-mtp"])
def test_a_golden_run_and_a_round_trip_hold(model: str, tmp_path: Path) -> None:
    (tmp_path / "golden").mkdir()
    command(tmp_path / "golden", "golden", "--model", model, *ON_STAGES)
    report = command(tmp_path, "roundtrip", "--model", model, *ON_STAGES, "--engine", "hf")
    checks = {outcome["code"]: outcome["verdict"] for outcome in report["outcomes"]}
    assert {code: checks[code] for code in (*JUDGED, "ENG001")} == dict.fromkeys((*JUDGED, "ENG001"), "holds")
    assert any(NOTE in note for note in report["run"]["notes"])


@pytest.mark.parametrize("model", ["tiny:glm4_moe-mtp", "tiny:deepseek_v3-mtp"])
def test_a_judged_training_run_holds(model: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "verifier", "train", "--model", model, "--run", str(tmp_path), "--verify", *KNOBS],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stdout + done.stderr
