"""GRPO in bf16 on GPUs to its end: from a fine-tuned model to held-out reward above 0.8, every step judged.

Fine-tuning and GRPO are timed apart. Three more steps are computed by transformers too, whose noise in bf16 bounds what
trainer and engine differ by. Colocated: trainer and vLLM on the same GPUs, weights by CUDA IPC. Disaggregated:
GPUs of their own, weights by NCCL. CUDA graphs in both. Two Ray nodes of one host train to the bits of one node.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

import verifier.checks  # noqa: F401  (fills the registry)
from tests.dist.ray_functions import cluster_of_two_nodes
from tests.h100.conftest import RESULTS
from tests.h100.lanes import FINE_TUNED
from tests.meta.sources import ROOT
from verifier.core import store
from verifier.plan.digest import digest_tensor
from verifier.report.report import report_of
from verifier.stages.advantage.records import PolicyColumns
from verifier.stages.logprob.records import SampledNoise

LEARNS = {
    "first": "null", "dtype": "bf16", "steps": "90", "data.batch_size": "256", "grpo.group_size": "4",
    "batch.max_tokens": "16384", "grpo.mini_batches": "4", "optimizer.learning_rate": "4e-4",
    "optimizer.warmup_steps": "10", "evaluation.every": "10", "checkpoint.every": "0", "engine.cuda_graphs": "true",
    "verify.every": "0",
}  # fmt: skip
"""Knobs over configs/add-grpo.yaml. No step is computed by transformers, which takes a minute for 1,024 rollouts."""
BEFORE, AFTER = 0.4, 0.8
"""Held-out reward at temperature 1: before the first step of GRPO at most, and at the end at least."""
LONGEST_S = 300.0
"""Seconds of fine-tuning and GRPO together, starts included, at most on one and two GPUs."""
SHORT = {"steps": "3", "data.batch_size": "32", "evaluation.num_problems": "32", "optimizer.learning_rate": "1e-4"}

SAMPLED = {"verify.every": "1", "grpo.drop_zero_variance": "false", "grpo.entropy_weight": "0.01"}
"""Knobs over `SHORT`: transformers computes each step, and every token is in the loss."""


def words_of(knobs: dict[str, str]) -> list[str]:
    """Words of a command line."""
    return [f"{name}={value}" for name, value in knobs.items()]


def trained(folder: Path, *words: str, **env: str) -> tuple[list[dict[str, float]], float]:
    """Train as a user does, with nothing violated; metrics of each step, and seconds."""
    command = [sys.executable, "-m", "verifier", "train", *words, "--verify", "--run", str(folder)]
    began = time.monotonic()
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=500, env={**os.environ, **env}
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    assert "steps judged, all hold" in done.stdout
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return rows, time.monotonic() - began


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folder of models that several tests use, of one process or of those of a `ci/gpu`."""
    results = os.environ.get(RESULTS)
    folder = tmp_path_factory.mktemp("models") if results is None else Path(results).parent / FINE_TUNED
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def fine_tuned(models) -> tuple[Path, float]:
    """Model of random weights after fine-tuning, and the seconds that it took; `ci/gpu` makes it once."""
    folder, took = models, models / "seconds"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not took.exists():
            words = ("configs/add-sft-short.yaml", "dtype=bf16", "mesh.dp=1", "verify.every=0")
            took.write_text(str(trained(folder / "run", *words)[1]))
    return folder / "run" / "hf_model", float(took.read_text())


def learns(folder: Path, first: tuple[Path, float], measured: Any, placement: str, knobs: dict[str, str]) -> float:
    """Train by reward; record what came of it, and compare held-out rewards with their bounds.

    Returns:
        Seconds of fine-tuning and GRPO together, starts included.
    """
    rows, seconds = trained(folder, "configs/add-grpo.yaml", f"model={first[0]}", *words_of(LEARNS | knobs))
    rewards = {int(row["held_out_version"]): row["held_out_reward"] for row in rows if "held_out_reward" in row}
    p99 = [row["mismatch_p99"] for row in rows]
    found = {
        "seconds": round(seconds, 1), "fine_tuning_s": round(first[1], 1), "steps": len(rows),
        "held_out_reward": rewards, "mismatch_max": max(row["mismatch_max"] for row in rows),
        "mismatch_p99": max(p99), "mismatch_k3": max(row["mismatch_k3"] for row in rows),
        "mismatch_trend": rows[-1]["mismatch_trend"],
        **{key: statistics.median(row[key] for row in rows) for key in ("time_s", "prepare_s", "train_s", "sync_s")},
    }  # fmt: skip
    measured(placement=placement, **found)
    assert rewards[0] < BEFORE
    assert max(rewards.values()) > AFTER
    return first[1] + seconds


PLACEMENTS = pytest.mark.parametrize(
    ("placement", "knobs"),
    [
        pytest.param("colocated", {"mesh.dp": "1"}, marks=pytest.mark.h100(gpus=1)),
        pytest.param("disaggregated", {"mesh.dp": "1", "transport": "nccl"}, marks=pytest.mark.h100(gpus=2)),
    ],
    ids=["colocated", "disaggregated"],
)


@pytest.mark.quiet
@PLACEMENTS
def test_rewards_rise(placement, knobs, fine_tuned, models, measured, tmp_path):
    seconds = learns(tmp_path / "run", fine_tuned, measured, placement, knobs)
    shutil.copytree(tmp_path / "run" / "hf_model", models / placement)
    assert seconds < LONGEST_S


@pytest.mark.own_process
@PLACEMENTS
def test_engine_agrees_afterwards(placement, knobs, models, measured, tmp_path):
    """Three small steps from the trained weights, which transformers computes too: its noise is the bound."""
    assert (models / placement).is_dir(), "test_rewards_rise left no model"
    words = words_of(LEARNS | SHORT | knobs | SAMPLED)
    trained(tmp_path / "run", "configs/add-grpo.yaml", f"model={models / placement}", *words)
    ratios = []
    for step in range(1, int(SHORT["steps"]) + 1):
        trace = store.read(tmp_path / "run" / "steps" / f"{step:06d}")
        assert "LGP009" in {outcome.code for outcome in report_of(trace, "").outcomes}
        (policy,), (noise,) = trace.of(PolicyColumns), trace.of(SampledNoise)
        old, engine, mask = (trace.array(policy, name) for name in ("old", "engine", "mask"))
        gaps = np.abs(old - engine)[mask.astype(bool)]
        ratios.append({"tokens": len(gaps), "mean": float(gaps.mean() / noise.mean), "noise": float(noise.mean)})
    measured(mismatch_of_noise=ratios)


@pytest.mark.h100(gpus=4)
@pytest.mark.own_process
@pytest.mark.parametrize(
    ("placement", "knobs"),
    [
        ("colocated on four", {"mesh.dp": "4", "engine.replicas": "4", "transport": "ipc"}),
        ("disaggregated two and two", {"mesh.dp": "2", "engine.tp": "2", "transport": "nccl"}),
    ],
    ids=["colocated-on-four", "two-and-two"],
)
def test_rewards_rise_on_four(placement, knobs, fine_tuned, measured, tmp_path):
    learns(tmp_path / "run", fine_tuned, measured, placement, knobs)


@pytest.mark.h100(gpus=4)
@pytest.mark.own_process
@pytest.mark.parametrize(
    "placed",
    [("mesh.dp=4", "transport=ipc"), ("mesh.dp=2", "engine.tp=2", "transport=nccl")],
    ids=["colocated", "disaggregated"],
)
def test_two_ray_nodes_have_the_bits_of_one(placed, fine_tuned, measured, tmp_path):
    words = ("configs/add-grpo.yaml", f"model={fine_tuned[0]}", *words_of(LEARNS | SHORT), *placed)
    found = {}
    trained(tmp_path / "one", *words, "ray.use=true")
    with cluster_of_two_nodes(tmp_path / "token") as (address, environment):
        nodes = ("ray.use=true", f"ray.address={address}", "ray.nodes=2")
        _, seconds = trained(tmp_path / "two", *words, *nodes, **environment)
    for name in ("one", "two"):
        files = sorted((tmp_path / name / "hf_model").glob("*.safetensors"))
        found[name] = {key: digest_tensor(tensor) for file in files for key, tensor in load_file(file).items()}
    measured(nodes=2, placed=placed, tensors=len(found["one"]), seconds=round(seconds, 1))
    assert found["one"] == found["two"]
