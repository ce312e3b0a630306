"""Knobs of Megatron on real ranks: each one arrives, and recomputation changes no bit of a gradient.

What this does not exercise: GPUs, which alone offload an optimizer's state and recompute norms and activations.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.meta.sources import ROOT
from verifier.mesh import Mesh
from verifier.model.tiny import write_tiny

TURNED = {
    "megatron.overlap_param_gather": ("false", "false"), "megatron.bucket_size": ("30000", "30000.0"),
    "megatron.recompute": ("full", "full"), "megatron.recompute_method": ("block", "block"),
    "megatron.recompute_layers": ("2", "2.0"), "optimizer.schedule": ("cosine", "cosine"),
    "optimizer.learning_rate": ("2e-3", "0.002"), "optimizer.least_learning_rate": ("1e-4", "0.0001"),
    "optimizer.warmup_steps": ("1", "1.0"), "optimizer.weight_decay": ("0.1", "0.1"),
    "optimizer.clip_grad": ("0.5", "0.5"), "optimizer.beta_1": ("0.8", "0.8"), "optimizer.beta_2": ("0.99", "0.99"),
    "optimizer.epsilon": ("1e-6", "1e-06"),
}  # fmt: skip
"""Knob -> (value that is asked for, value in the effective config)."""
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
BLOCK = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 2}
SELECTIVE = {"recompute_granularity": "selective", "recompute_method": None, "recompute_num_layers": None}
RECOMPUTED = {
    "qwen3": [FULL, BLOCK, {**SELECTIVE, "recompute_modules": ["core_attn"]}],
    "deepseek-v3": [
        FULL, {**SELECTIVE, "recompute_modules": ["core_attn", "shared_experts"]},
        {**SELECTIVE, "recompute_modules": ["moe"]},
    ],
}  # fmt: skip


@pytest.mark.slow
def test_knobs_that_are_turned_are_in_the_effective_config(tmp_path):
    words = [f"{knob}={value}" for knob, (value, _) in TURNED.items()]
    command = [
        sys.executable,
        "-m",
        "verifier",
        "train",
        "configs/add-sft.yaml",
        "--verify",
        "--run",
        str(tmp_path / "r"),
    ]
    done = subprocess.run(
        [*command, "steps=2", "data.batch_size=8", "evaluation.num_problems=0", *words],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    effective = json.loads((tmp_path / "r" / "effective.json").read_text())
    assert {knob: effective["knobs"][knob] for knob in TURNED} == {knob: value for knob, (_, value) in TURNED.items()}
    assert effective["model"]["recompute_granularity"] == "full"


@pytest.mark.parametrize("model", RECOMPUTED)
def test_recomputation_changes_no_bit_of_a_gradient(model, trainer_launcher, checkpoints, tmp_path):
    """The same operations on the same inputs, twice.

    Not so `mlp`, whose fused norm reads the residual stream too: the summands of its gradient are added in another
    order.
    """

    def gradients(number: int, overrides: dict) -> bytes:
        file = tmp_path / f"{number}.safetensors"
        trainer_launcher.run(
            "trainer_functions:gradients", world_size=2, run_dir=tmp_path, mesh=Mesh(dp=2),
            args={
                "checkpoint": str(write_tiny(model, checkpoints)), "mesh": {"dp": 2}, "data_parallel": {},
                "overrides": overrides, "file": str(file),
            },
        )  # fmt: skip
        return file.read_bytes()

    expected = gradients(0, {})
    for number, overrides in enumerate(RECOMPUTED[model], start=1):
        assert gradients(number, overrides) == expected, overrides
