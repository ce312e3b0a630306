"""What recording through `verifier.probe` costs a loop of transformers and vLLM on the CPU tier.

What this does not exercise: weights of billions of elements, whose digests are a pass over memory each
(tests/bench/test_bench_digest.py), and GPUs.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.sources import ROOT
from verifier.engine.process import VLLM_ENVIRONMENT
from verifier.model.tiny import write_tiny

GREATEST_SHARE = 0.02
"""Of a step without the probe (issue 19); copies in every step are measured and have no bound."""


@pytest.mark.slow
def test_recording_costs_little_of_a_step(tmp_path: Path) -> None:
    checkpoint = write_tiny("qwen3", tmp_path / "checkpoint")
    script = str(ROOT / "tests/bench/probe_cost.py")
    environment = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, script, str(checkpoint), str(tmp_path), "16", "64"], capture_output=True, text=True,
        timeout=900, check=False, cwd=tmp_path,
        env={**VLLM_ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": "nobind", **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(*rows, sep="\n")
    assert [row["keep_every"] for row in rows] == [0, 0, 8, 1]
    for row in rows[:-1]:
        assert sum(row["shares"].values()) < GREATEST_SHARE, row
