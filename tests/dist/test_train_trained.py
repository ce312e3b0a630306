"""Clean steps in bf16 from a model that GRPO has trained raise no alarm, each of them computed by transformers too.

From random weights (test_train_clean.py) every token has a gradient. In steps of a trained model few tokens have one,
and what bf16 rounds of these is most of what trainer and transformers differ by.

What this does not exercise: GPUs, mixtures, and adapters, whose gradients transformers does not compute in bf16.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.meta.sources import ROOT

pytestmark = pytest.mark.slow

GRPO = (
    "configs/add-grpo.yaml", "first=null", "data.batch_size=32", "grpo.group_size=4", "batch.max_tokens=16384",
    "mesh.dp=1", "optimizer.learning_rate=1e-4",
)  # fmt: skip
FINE_TUNING = ("configs/add-sft-short.yaml", "data.batch_size=32", "mesh.dp=1", "optimizer.learning_rate=1e-4")
ALL_TOKENS = ("grpo.drop_zero_variance=false", "grpo.entropy_weight=0.01")
"""Every sampled token is in the loss."""
AHEAD = ("grpo.max_staleness=1", "grpo.ratio_over=engine")
CASES = {
    "four updates a step": (*GRPO, "grpo.mini_batches=4"),
    "four updates a step, all tokens": (*GRPO, "grpo.mini_batches=4", *ALL_TOKENS),
    "one update a step": (*GRPO, "grpo.mini_batches=1", "data.batch_size=64"),
    "with a reference": (*GRPO, "grpo.mini_batches=4", "grpo.kl_weight=0.05"),
    "sequence ratios": (*GRPO, "grpo.mini_batches=4", "grpo.loss=gspo"),
    "one step ahead": (*GRPO, *AHEAD, "grpo.mode=async"),
    "in flight, two ranks": (*GRPO, *AHEAD, "grpo.mode=inflight", "mesh.dp=2"),
    "tp2": (*GRPO, "mesh.tp=2"),
    "pp2, temperature 0.8": (*GRPO, "mesh.pp=2", "grpo.temperature=0.8"),
    "fine-tuning": FINE_TUNING,
}
"""Name -> words of the command line; the last of a knob counts."""
STEPS = 20


def train(run: Path, *words: str) -> str:
    """Train as a user does; what the command says."""
    knobs = {word.partition("=")[0]: word for word in words}
    command = [sys.executable, "-m", "verifier", "train", *knobs.values(), "checkpoint.every=0", "--run", str(run)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:] + done.stdout[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """Checkpoint in bf16 of a model that solves most of the sums, fine-tuned and then trained by reward in fp32."""
    run, model = tmp_path_factory.mktemp("trained") / "run", tmp_path_factory.mktemp("model") / "bf16"
    train(run, "configs/add-grpo.yaml", "steps=130", "verify.every=0")
    shutil.copytree(run / "hf_model", model)
    for file in model.glob("*.safetensors"):
        rounded = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(file).items()}
        save_file(rounded, file, metadata={"format": "pt"})
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}))
    return model


@pytest.mark.parametrize("case", CASES)
def test_no_step_of_a_trained_model_raises_an_alarm(case, trained, tmp_path):
    words = (
        *CASES[case], f"model={trained}", "dtype=bf16", f"steps={STEPS}", "optimizer.warmup_steps=10", "verify.every=1",
        "verify.steps=true", "evaluation.every=1000", "evaluation.num_problems=32", "evaluation.stop_above=2.0",
    )  # fmt: skip
    assert f"{STEPS} steps judged, all hold" in train(tmp_path / "run", *words)
