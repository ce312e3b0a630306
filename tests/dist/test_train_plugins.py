"""A plugin's loss and estimator reach every rank, and its reward the process that scores.

What this does not exercise: plugins on several nodes of a cluster.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.meta.sources import ROOT
from tests.processes import said
from verifier.faults.training_trial import GRPO_KNOBS

PLUGIN = """
from verifier.algorithms.registry import advantage, loss, reward


@loss("echo")
def echo(inputs, options):
    return inputs.advantage_T + 0 * inputs.current_T


@advantage("seven")
def seven(rewards_N, groups, token_counts_N):
    return 7 + 0 * rewards_N


@reward("always_half")
def always_half(text, answer):
    return 0.5
"""
COMMON = ("model=tiny:add", "algorithm=grpo", "plugins=[my_algorithms]", "evaluation.num_problems=0", "steps=2")
RUNS = {
    "recorded": (*GRPO_KNOBS, "mesh.dp=2", "grpo.loss=echo", "grpo.advantage=seven"),
    "live": ("engine.kind=hf", "data.batch_size=2", "grpo.group_size=2", "grpo.max_answer_tokens=4",
             "grpo.reward=always_half"),
}  # fmt: skip


@pytest.fixture
def train(tmp_path):
    (tmp_path / "my_algorithms.py").write_text(PLUGIN)
    paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])

    def run(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "verifier", "train", *COMMON, *words, "--run", str(tmp_path / "run")]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=300, env=os.environ | {"PYTHONPATH": paths}
        )

    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", ["recorded", "live"])
def test_what_a_plugin_registers_trains(name, train, tmp_path):
    done = train(*RUNS[name], "--verify")
    assert done.returncode == 0, done.stderr + done.stdout
    assert "2 steps judged, all hold" in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    if name == "recorded":
        assert [(line["loss"], line["grad_norm"]) for line in lines] == [(7.0, 0.0), (7.0, 0.0)]
    else:
        assert [line["reward"] for line in lines] == [0.5, 0.5]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("plugins=[absent]",), "plugin `absent` is not found: install it, or add its folder to PYTHONPATH"),
        (("grpo.loss=mine",), "loss `mine` is unknown (known: cispo, clipped, cross_entropy, echo, gspo, importance): "
         "list the module that registers it in `plugins`"),
    ],
)  # fmt: skip
def test_what_no_plugin_registers_is_refused(words, sentence, train, tmp_path):
    done = train(*GRPO_KNOBS, *words, "--dry-run") if words[0] != "plugins=[absent]" else train_without(words, tmp_path)
    assert (done.returncode, said(done.stderr)) == (4, f"verifier: {sentence}")


def train_without(words, tmp_path) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable, "-m", "verifier", "train", "model=tiny:add", *words, "--dry-run", "--run", str(tmp_path / "run")
    ]  # fmt: skip
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
