"""`verifier train` as a user calls it: text in, judged steps, weights and tokenizer out.

What this does not exercise: the accuracy that a whole run reaches (slow: test_train_learns.py), and the bugs that the
checks catch (tests/faults).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.sources import ROOT
from tests.processes import said
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.trainer.controller import Trainer

CONFIG = "configs/add-sft.yaml"


def train(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verifier", "train", CONFIG, *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> tuple[Path, str]:
    folder = tmp_path_factory.mktemp("train") / "run"
    done = train("--verify", "steps=3", "data.batch_size=16", "evaluation.num_problems=32", "--run", str(folder))
    assert done.returncode == 0, done.stderr + done.stdout
    return folder, done.stdout


def test_every_step_is_judged_and_holds(run):
    folder, printed = run
    assert "3 steps judged, all hold" in printed
    assert [path.name for path in sorted((folder / "steps").iterdir())] == ["000001", "000002", "000003"]


def test_metrics_have_a_line_a_step_and_the_loss_falls(run):
    folder, _ = run
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3]
    assert [line["num_tokens"] for line in lines] == [80, 80, 80]  # 16 answers of `####`, three digits and an end


def test_a_step_is_judged_again_from_its_trace(run):
    folder, _ = run
    command = [sys.executable, "-m", "verifier", "replay", str(folder / "steps" / "000002")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1].startswith("holds: ")


def test_transformers_loads_what_was_exported(run):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, _ = run
    model = AutoModelForCausalLM.from_pretrained(folder / "hf_model")
    tokenizer = AutoTokenizer.from_pretrained(folder / "hf_model")
    ids = tokenizer("37+85=", return_tensors="pt").input_ids
    assert model(ids).logits.shape == (1, 7, 32)


def test_the_same_seed_gives_the_same_weights_with_and_without_judging(run, trainer_launcher, tmp_path):
    folder, _ = run
    words = ["steps=3", "data.batch_size=16", "evaluation.num_problems=0", f"run={tmp_path / 'again'}"]
    config, _ = load(TrainConfig, file=ROOT / CONFIG, overrides=words)
    Trainer(config, print, launcher=trainer_launcher).run()
    for file in sorted((folder / "hf_model").glob("*.safetensors")):
        assert file.read_bytes() == (tmp_path / "again" / "hf_model" / file.name).read_bytes()


@pytest.mark.slow
def test_a_folder_with_a_run_of_another_config_is_refused(run):
    folder, _ = run
    done = train("--run", str(folder))
    assert (done.returncode, said(done.stderr)) == (
        4, f"verifier: the run folder `{folder}` holds a run with data.batch_size=16, and data.batch_size=128 is asked "
        "for: give the same value to continue it, or choose another --run",
    )  # fmt: skip
