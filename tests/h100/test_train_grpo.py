"""GRPO in bf16 on GPUs to its end: from a model of random weights to held-out reward above 0.8, every step judged.

Colocated: trainer and vLLM on one GPU, weights by CUDA IPC. Disaggregated: a GPU each, weights by NCCL, CUDA graphs.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.meta.sources import ROOT

LEARNS = (
    "dtype=bf16", "mesh.dp=1", "steps=140", "data.batch_size=128", "batch.max_tokens=16384", "grpo.mini_batches=4",
    "optimizer.learning_rate=4e-4", "optimizer.warmup_steps=10", "checkpoint.every=0", "engine.cuda_graphs=true",
    "evaluation.every=20", "verify.every=0",
)  # fmt: skip
"""Knobs over configs/add-grpo.yaml. No step is computed by transformers, which takes a minute for 1,024 rollouts."""
BEFORE, AFTER = 0.4, 0.8
"""Held-out reward at temperature 1: before the first step of GRPO at most, and at the end at least."""
LONGEST_S = 300.0


def learn(folder: Path, *words: str) -> list[dict[str, float]]:
    """Fine-tune, then train by reward, as a user does, with nothing violated; metrics of each step of GRPO."""
    command = [sys.executable, "-m", "verifier", "train", "configs/add-grpo.yaml", "--verify", "--run", str(folder)]
    done = subprocess.run([*command, *LEARNS, *words], cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert "steps judged, all hold" in done.stdout
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def require_learnt(rows: list[dict[str, float]], seconds: float) -> dict[str, object]:
    """Compare held-out rewards with their bounds, and mismatches with their floor; what to record."""
    rewards = {row["step"]: row["held_out_reward"] for row in rows if "held_out_reward" in row}
    first = next(iter(rewards.values()))
    p99 = [row["mismatch_p99"] for row in rows]
    found = {
        "seconds": round(seconds, 1), "steps": len(rows), "held_out_reward": rewards,
        "mismatch_max": max(row["mismatch_max"] for row in rows), "mismatch_p99": max(p99),
        "mismatch_k3": max(row["mismatch_k3"] for row in rows), "mismatch_trend": rows[-1]["mismatch_trend"],
        **{key: statistics.median(row[key] for row in rows) for key in ("time_s", "prepare_s", "train_s", "sync_s")},
    }  # fmt: skip
    print(found, flush=True)
    assert first < BEFORE
    assert max(rewards.values()) > AFTER
    assert seconds < LONGEST_S
    return found


@pytest.mark.h100(gpus=1)
@pytest.mark.own_process
def test_colocated(measured, tmp_path):
    began = time.monotonic()
    rows = learn(tmp_path / "run")
    measured(placement="colocated", **require_learnt(rows, time.monotonic() - began))


@pytest.mark.h100(gpus=2)
@pytest.mark.own_process
def test_disaggregated_by_nccl_with_cuda_graphs(measured, tmp_path):
    began = time.monotonic()
    rows = learn(tmp_path / "run", "transport=nccl")
    measured(placement="disaggregated", **require_learnt(rows, time.monotonic() - began))
