"""Somebody else's loop, on real vLLM, recorded by `verifier.probe`: it holds, and its bugs are caught where they are.

What this does not exercise: several trainer processes with one engine, tensor parallelism, GPUs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import verifier.checks  # noqa: F401 - fills the registry
from tests.meta.sources import ROOT
from verifier.core.finding import Verdict
from verifier.core.stage import Stage
from verifier.core.store import read
from verifier.engine.process import VLLM_ENVIRONMENT
from verifier.model.tiny import write_tiny
from verifier.oracle.oracle import Oracle
from verifier.probe.loop_oracle import add_oracle
from verifier.report import Report, report_of

pytestmark = pytest.mark.slow

CAUGHT = {
    "logprobs off by one": (Stage.ROLLOUT, "LGP009"),
    "another tensor's name": (Stage.TRANSPORT, "TPT001"),
    "norm rounded to bf16": (Stage.TRANSPORT, "TPT001"),
    "tensor sent in bf16": (Stage.TRANSPORT, "TPT001"),
    "sync skipped": (Stage.TRANSPORT, "TPT002"),
    "stale at the second sync": (Stage.EXPORT, "WGT005"),
    "mask covers the prompt": (Stage.DATA, "ADV003"),
    "micro-batch dropped": (Stage.LOSS, "LSS001"),
}
"""Fault of the loop -> first bad stage, and a check that sees it there."""
OFTEN = ("logprobs off by one", "sync skipped", "micro-batch dropped")
"""Those of the default tier."""
CLEAN = {
    "ADV002", "ADV003", "DAT004", "DAT008", "ENG001", "ENG004", "ENG009", "LGP001", "LGP003", "LGP009", "LSS001",
    "LSS002", "PLN001", "PLN002", "TPT001", "TPT002", "TRN001", "WGT004", "WGT005", "WGT006", "WGT008",
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny("qwen3", tmp_path_factory.mktemp("checkpoint"))


@pytest.fixture(scope="module")
def traces(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(checkpoint, tmp_path_factory.mktemp("loop"), "clean", *OFTEN)


@pytest.fixture(scope="module")
def rarer(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return recorded(checkpoint, tmp_path_factory.mktemp("rarer"), *(fault for fault in CAUGHT if fault not in OFTEN))


def recorded(checkpoint: Path, folder: Path, *runs: str) -> Path:
    """Run the loop, clean or with a fault, one run after another; a folder of their traces."""
    command = [sys.executable, str(ROOT / "tests/dist/foreign_loop.py"), str(checkpoint), str(folder), *runs]
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=400, check=False, cwd=folder,
        env={**VLLM_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return folder


@pytest.fixture(scope="module")
def oracle(checkpoint: Path) -> Iterator[Oracle]:
    with Oracle(checkpoint, 120.0) as running:
        yield running


def judged(trace: Path, checkpoint: Path, oracle: Oracle) -> Report:
    add_oracle(trace, checkpoint, oracle)
    return report_of(read(trace), str(trace))


def test_clean_loop_holds_by_the_command(traces: Path) -> None:
    command = [sys.executable, "-m", "verifier", "judge", "--oracle", "--json", "-", str(traces / "trace clean")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr
    checks = json.loads(done.stdout)["outcomes"]
    assert {item["code"] for item in checks if item["verdict"] == "holds"} == CLEAN


@pytest.mark.parametrize("fault", OFTEN)
def test_a_bug_of_the_loop_is_caught_in_its_stage(fault: str, traces: Path, checkpoint: Path, oracle: Oracle) -> None:
    require_caught(fault, judged(traces / f"trace {fault}", checkpoint, oracle))


@pytest.mark.slow
@pytest.mark.parametrize("fault", [fault for fault in CAUGHT if fault not in OFTEN])
def test_a_rarer_bug_is_caught_too(fault: str, rarer: Path, checkpoint: Path, oracle: Oracle) -> None:
    require_caught(fault, judged(rarer / f"trace {fault}", checkpoint, oracle))


def require_caught(fault: str, report: Report) -> None:
    """The report is violated first in the stage of the fault, by its check among others."""
    stage, code = CAUGHT[fault]
    assert report.verdict is Verdict.VIOLATED
    first = report.violated[0]
    assert first.finding is not None
    assert first.finding.first_bad_stage is stage
    assert code in [item.code for item in report.violated]
    assert not [item.code for item in report.outcomes if item.error]
