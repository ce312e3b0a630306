"""The plugin's fixtures that run commands, in a pytest of another project: what holds passes, what does not says why.

What this does not exercise: fixtures of two workers at once.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.sources import ROOT

INNER = """
import json

from verifier.stages.engine.records import SourceTensor
from verifier.core.store import read

def test_golden(verifier_golden, tmp_path):
    trace = read(verifier_golden("model=tiny:qwen3"))
    tensors = {
        item.name: {"dtype": item.dtype, "shape": list(item.shape), "digest": item.digest}
        for item in trace.of(SourceTensor)
    }
    tensors["model.norm.weight"]["digest"] = "vd1:" + "0" * 32
    record = {"architecture": "Qwen3ForCausalLM", "dtype": "float32", "model": "tiny:qwen3", "tensors": tensors}
    (tmp_path / "other.json").write_text(json.dumps(record))
    verifier_golden("model=tiny:qwen3", f"against={tmp_path / 'other.json'}")

def test_roundtrip(verifier_roundtrip):
    verifier_roundtrip("model=tiny:qwen3", "engine.kind=hf", "cycles=1")
"""


@pytest.mark.slow
def test_fixtures_run_the_commands_and_fail_by_their_reports(tmp_path: Path) -> None:
    (tmp_path / "test_inner.py").write_text(INNER)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "verifier.pytest_plugin", f"--rootdir={tmp_path}", "-q", str(tmp_path)],
        cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert "1 failed, 1 passed" in done.stdout, done.stdout[-6000:] + done.stderr[-3000:]
    assert "FAILED test_inner.py::test_golden" in done.stdout
    assert "`model.norm.weight` holds other bits in the export" in done.stdout
