"""GRPO in bf16 on GPUs to its end: from a fine-tuned model to held-out reward above 0.8, every step judged.

Fine-tuning and GRPO are timed apart. Colocated: trainer and vLLM on one GPU, weights by CUDA IPC. Disaggregated: a GPU
each, weights by NCCL, CUDA graphs.
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
    "first=null", "dtype=bf16", "mesh.dp=1", "steps=130", "data.batch_size=128", "batch.max_tokens=16384",
    "grpo.mini_batches=4", "optimizer.learning_rate=4e-4", "optimizer.warmup_steps=10", "checkpoint.every=0",
    "engine.cuda_graphs=true", "verify.every=0",
)  # fmt: skip
"""Knobs over configs/add-grpo.yaml. No step is computed by transformers, which takes a minute for 1,024 rollouts."""
BEFORE, AFTER = 0.4, 0.8
"""Held-out reward at temperature 1: before the first step of GRPO at most, and at the end at least."""
LONGEST_S = 300.0
"""Seconds of fine-tuning and GRPO together, starts included, at most."""


def trained(folder: Path, *words: str) -> tuple[list[dict[str, float]], float]:
    """Train as a user does, with nothing violated; metrics of each step, and seconds."""
    command = [sys.executable, "-m", "verifier", "train", *words, "--verify", "--run", str(folder)]
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert "steps judged, all hold" in done.stdout
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, time.monotonic() - began


@pytest.fixture(scope="module")
def fine_tuned(tmp_path_factory) -> tuple[Path, float]:
    """Model of random weights after fine-tuning, and the seconds that it took."""
    folder = tmp_path_factory.mktemp("first") / "run"
    _, seconds = trained(folder, "configs/add-sft-short.yaml", "dtype=bf16", "mesh.dp=1", "verify.every=0")
    return folder / "hf_model", seconds


def learnt(folder: Path, first: tuple[Path, float], *words: str) -> dict[str, object]:
    """Train by reward; compare held-out rewards and seconds with their bounds; what to record."""
    rows, seconds = trained(folder, "configs/add-grpo.yaml", f"model={first[0]}", *LEARNS, *words)
    rewards = {row["step"]: row["held_out_reward"] for row in rows if "held_out_reward" in row}
    p99 = [row["mismatch_p99"] for row in rows]
    found = {
        "seconds": round(seconds, 1), "fine_tuning_s": round(first[1], 1), "steps": len(rows),
        "held_out_reward": rewards, "mismatch_max": max(row["mismatch_max"] for row in rows),
        "mismatch_p99": max(p99), "mismatch_k3": max(row["mismatch_k3"] for row in rows),
        "mismatch_trend": rows[-1]["mismatch_trend"],
        **{key: statistics.median(row[key] for row in rows) for key in ("time_s", "prepare_s", "train_s", "sync_s")},
    }  # fmt: skip
    print(found, flush=True)
    assert next(iter(rewards.values())) < BEFORE
    assert max(rewards.values()) > AFTER
    assert first[1] + seconds < LONGEST_S
    return found


@pytest.mark.h100(gpus=1)
@pytest.mark.own_process
def test_colocated(fine_tuned, measured, tmp_path):
    measured(placement="colocated", **learnt(tmp_path / "run", fine_tuned))


@pytest.mark.h100(gpus=2)
@pytest.mark.own_process
def test_disaggregated_by_nccl_with_cuda_graphs(fine_tuned, measured, tmp_path):
    measured(placement="disaggregated", **learnt(tmp_path / "run", fine_tuned, "transport=nccl"))
