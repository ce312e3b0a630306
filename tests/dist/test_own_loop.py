"""The GRPO loop of docs/examples: it holds in all that it hands over, and twelve of its bugs are caught in their stage.

What this does not exercise: several trainer processes, GPUs, models that fit no test.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import verifier.checks  # noqa: F401 - fills the registry
from tests.meta.sources import ROOT
from verifier.core.finding import Verdict
from verifier.core.stage import Stage
from verifier.core.store import read
from verifier.engine.process import VLLM_ENVIRONMENT
from verifier.model.tiny import write_tiny
from verifier.oracle.oracle import Oracle
from verifier.probe.loop_oracle import add_oracle
from verifier.report import Report, render_text, report_of

EXAMPLES = ROOT / "docs" / "examples"
LOOP = (EXAMPLES / "grpo_loop.py").read_text()
SENT = "record.sending(named, version, live=model.named_parameters())"
FAULTS = {
    "prompt of another example": ("encode(asked[at])", "encode(asked[at - 1])", Stage.DATA, "DAT009"),
    "end token out of the loss": ("[[1] * len(row) for", "[[1] * (len(row) - 1) + [0] for", Stage.DATA, "DAT008"),
    "mean of the batch": ("grouped.mean(1, keepdim=True)", "grouped.mean()", Stage.ADVANTAGE, "ADV002"),
    "mean of means": (".sum() / count", ".sum() / (2 * mask[:, 1:].sum())", Stage.ADVANTAGE, "ADV001"),
    "KL of the wrong sign": ("losses + 0.05", "losses - 0.05", Stage.LOSS, "LSS004"),
    "loss of the last micro-batch": ("total += loss", "total = loss", Stage.LOSS, "LSS004"),
    "clip not applied": ("(model.parameters(), CLIP_GRAD)", "(model.parameters(), 1e9)", Stage.TRAIN, "TRN005"),
    "gradients zeroed between": (
        "                loss.backward()",
        "                optimizer.zero_grad()\n                loss.backward()",
        Stage.TRAIN,
        "TRN006",
    ),
    "weights of the start sent": (
        "in model.named_parameters())\n",
        "in reference.named_parameters())\n",
        Stage.EXPORT,
        "WGT005",
    ),
    "norm rounded on the wire": (SENT, f"((n, v.bfloat16().float()) for n, v in {SENT})", Stage.TRANSPORT, "TPT001"),
    "evaluated on the training set": (
        "problems[:2], problems[2:]",
        "problems[2:4], problems[2:]",
        Stage.DATA,
        "DAT011",
    ),
    "evaluation of another version": ("claimed=step", "claimed=step - 1", Stage.ROLLOUT, "LGP015"),
}
"""Bug -> what the loop has, what it has then, first bad stage, a check that sees it there."""
HELD = {
    "ADV001",
    "ADV002",
    "ADV003",
    "CFG001",
    "DAT004",
    "DAT007",
    "DAT008",
    "DAT009",
    "DAT011",
    "DAT013",
    "DAT014",
    "DAT015",
    "DAT016",
    "ENG001",
    "ENG004",
    "ENG009",
    "LGP006",
    "LGP009",
    "LGP010",
    "LGP011",
    "LGP015",
    "LGP017",
    "LSS003",
    "LSS004",
    "PCK001",
    "PCK004",
    "PLN001",
    "PLN002",
    "TPT001",
    "TPT002",
    "TRN002",
    "TRN003",
    "TRN005",
    "TRN006",
    "WGT001",
    "WGT004",
    "WGT005",
    "WGT006",
    "WGT008",
    "WGT010",
    "WGT016",
}
ASKED = {"LGP001", "LGP003", "LGP004", "LGP012", "LGP014", "LSS001", "LSS002", "TRN001"}
"""Checks of the oracle's evidence."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("add", tmp_path_factory.mktemp("loop") / "checkpoint")


def run(loop: str, checkpoint: Path, trace: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    """Run the loop in this process; its report."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    torch.set_num_threads(1)  # as the tier's other processes have
    names: dict[str, object] = {"__name__": "loop"}
    exec(compile(loop, "grpo_loop.py", "exec"), names)
    names["train"](checkpoint, trace)  # type: ignore[operator]
    return report_of(read(trace), str(trace))


def test_the_loop_holds(checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run(LOOP, checkpoint, tmp_path / "trace", monkeypatch)
    assert report.verdict is Verdict.HOLDS, render_text(report)
    assert {item.code for item in report.outcomes} == HELD
    with Oracle(checkpoint, 120.0) as oracle:
        add_oracle(tmp_path / "trace", checkpoint, oracle)
    report = report_of(read(tmp_path / "trace"), "trace")
    assert report.verdict is Verdict.HOLDS, render_text(report)
    assert {item.code for item in report.outcomes} == HELD | ASKED
    assert not report.gaps


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bug_is_caught_in_its_stage(
    fault: str, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong, stage, code = FAULTS[fault]
    assert LOOP.count(right) == 1, fault
    loop = LOOP.replace(right, wrong).replace("STEPS, PROMPTS = 3, 4", "STEPS, PROMPTS = 2, 3")
    report = run(loop, checkpoint, tmp_path / "trace", monkeypatch)
    assert report.violated, render_text(report)
    first = report.violated[0].finding
    assert first is not None
    assert first.first_bad_stage is stage, render_text(report)
    assert code in [item.code for item in report.violated]
    assert not [item.code for item in report.outcomes if item.error]


@pytest.mark.slow
def test_the_loop_holds_with_vllm(checkpoint: Path, tmp_path: Path) -> None:
    """The workers record what they are given, load and hold."""
    command = [sys.executable, str(EXAMPLES / "grpo_loop.py"), str(checkpoint), str(tmp_path / "trace"), "vllm"]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
        cwd=tmp_path,
        env={**VLLM_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind", **environment},
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    report = report_of(read(tmp_path / "trace"), "trace")
    assert report.verdict is Verdict.HOLDS, render_text(report)
    assert {item.code for item in report.outcomes} >= HELD | {"ENG001", "ENG004", "ENG009"}
