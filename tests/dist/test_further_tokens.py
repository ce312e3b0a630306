"""Commands on checkpoints with a layer for further tokens (MTP), as published for DeepSeek-V3 and GLM-4.5: all hold.

What this does not exercise: vLLM on a GPU.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.dist.test_roundtrip import ROOT, command

pytestmark = pytest.mark.slow

ON_STAGES = ("--pp", "2")
NOTE = "tensors of layers that predict further tokens (MTP) are exported and not served"
JUDGED = ("LSS001", "TRN001", "WGT001", "WGT002")
KNOBS = ("steps=2", "verify.every=1", "optimizer.weight_decay=0.1")
SFT = ("algorithm=sft", "data.batch_size=8", "batch.max_tokens=64")
GRPO = ("algorithm=grpo", "--engine", "hf", "data.batch_size=4", "grpo.group_size=2", "batch.max_tokens=96")
FURTHER = "megatron.mtp_loss_scaling_factor=0.3"
MODEL, ARITHMETIC = "tiny:deepseek_v3-mtp", "data.source=arithmetic"
DIGITS = "23+45=68####12+7=19+31=50##60+25=85##71+8=79"


@pytest.mark.parametrize("model", ["tiny:glm4_moe-mtp", "tiny:deepseek_v3-mtp"])
def test_a_golden_run_and_a_round_trip_hold(model: str, tmp_path: Path) -> None:
    (tmp_path / "golden").mkdir()
    command(tmp_path / "golden", "golden", "--model", model, *ON_STAGES)
    report = command(tmp_path, "roundtrip", "--model", model, *ON_STAGES, "--engine", "hf")
    checks = {outcome["code"]: outcome["verdict"] for outcome in report["outcomes"]}
    assert {code: checks[code] for code in (*JUDGED, "ENG001")} == dict.fromkeys((*JUDGED, "ENG001"), "holds")
    assert any(NOTE in note for note in report["run"]["notes"])


def train(tmp_path: Path, *words: str) -> tuple[int, str]:
    asked = [sys.executable, "-m", "verifier", "train", "--run", str(tmp_path / "run"), "--verify", *KNOBS, *words]
    done = subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, timeout=900)
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def texts(tmp_path: Path) -> tuple[str, ...]:
    """Texts of even and odd lengths."""
    rows = [{"prompt": "1", "response": DIGITS[: 2 + 5 * at]} for at in range(8)]
    (tmp_path / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return (f"data.source={tmp_path / 'texts.jsonl'}", "evaluation.num_problems=0", f"model={MODEL}", FURTHER)


@pytest.mark.parametrize(
    "words",
    [
        ("model=tiny:glm4_moe-mtp", *SFT, ARITHMETIC),
        (f"model={MODEL}", *SFT, ARITHMETIC),
        ("model=tiny:glm4_moe-mtp", *SFT, ARITHMETIC, FURTHER),
        (f"model={MODEL}", *SFT, ARITHMETIC, FURTHER, "mesh.pp=2", "mesh.dp=2", "megatron.recompute=full"),
        (f"model={MODEL}", *GRPO, ARITHMETIC, FURTHER, "mesh.dp=2"),
    ],
    ids=["glm, off", "deepseek, off", "glm", "deepseek, stages and copies", "grpo"],
)
def test_a_judged_training_run_holds(words: tuple[str, ...], tmp_path: Path) -> None:
    code, said = train(tmp_path, *words)
    assert code == 0, said


@pytest.mark.parametrize(("more", "code"), [((), 1), (("--fix", "megatron-6205"), 0)], ids=["as shipped", "mended"])
def test_labels_across_the_boundaries_of_a_pack_are_a_known_bug(
    more: tuple[str, ...], code: int, texts: tuple[str, ...], tmp_path: Path
) -> None:
    found, said = train(tmp_path, *SFT, *texts, "mesh.tp=2", "mesh.ep=2", *more)
    assert found == code, said
    assert code == 0 or {"LSS001", "LSS002", "#6205"} <= {*re.findall(r"LSS\d+|#6205", said)}, said
