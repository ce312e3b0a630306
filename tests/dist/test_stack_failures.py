"""Runs that the real stack ends: a rank in megatron-bridge, an engine in vLLM, a training run in megatron-core.

Each is a violation in the stage in which it died, with exit code 1, and its trace says the same when it is judged
again.

What this does not exercise: which frame of a traceback counts (tests/unit/launch/test_stack_failure.py).
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import verifier.checks
from tests.meta.sources import ROOT
from verifier.cli.train import started_judge
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.errors import ViolationFound
from verifier.faults.injection import INJECTED
from verifier.launch.fork_launcher import ForkLauncher
from verifier.model.tiny import write_tiny
from verifier.probes.training.run_evidence import RunEvidence
from verifier.probes.training.step_trace import leave_failure
from verifier.report import report_of
from verifier.trainer.controller import Trainer
from verifier.trainer.observer import SILENT

OLMOE = """
import sys, torch
from transformers import OlmoeConfig, OlmoeForCausalLM
torch.manual_seed(0)
OlmoeForCausalLM(OlmoeConfig(
    vocab_size=320, hidden_size=64, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=4, num_experts=4, num_experts_per_tok=2, max_position_embeddings=512, pad_token_id=None,
    eos_token_id=1,
)).save_pretrained(sys.argv[1])
"""
"""Writes a checkpoint whose norm of queries is as wide as all heads, which megatron-bridge does not divide."""


def verifier(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verifier", *words]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


def report_after(folder: Path, *words: str) -> tuple[dict, str]:
    """The report and the first line on stderr of a round trip that the stack ends; a replay has the same report."""
    trace, files = folder / "trace", [folder / "live.json", folder / "again.json"]
    done = verifier("roundtrip", *words, "--cycles", "1", "--trace", str(trace), "--json", str(files[0]))
    assert done.returncode == 1, done.stderr
    again = verifier("replay", str(trace), "--json", str(files[1]))
    assert (again.returncode, again.stdout) == (1, done.stdout)
    live, replayed = (json.loads(file.read_text()) for file in files)
    assert live == replayed
    sentences = [line for line in done.stderr.splitlines() if line.startswith("verifier: ")]
    return live, sentences[0]


@pytest.mark.slow
def test_a_rank_that_dies_in_the_bridge(tmp_path):
    model = tmp_path / "olmoe"
    subprocess.run([sys.executable, "-c", OLMOE, str(model)], check=True, capture_output=True, timeout=120)
    report, sentence = report_after(tmp_path, "--model", str(model), "--tp", "2", "--engine", "hf")
    assert sentence.startswith("verifier: megatron-bridge 0.")
    assert "megatron/bridge/models/olmoe/olmoe_provider.py:" in sentence
    cause = report["cause"]
    assert (cause["code"], cause["stage"]) == ("STK001", "logprob")
    assert cause["owner"].startswith("trainer rank ")
    finding = next(item["finding"] for item in report["outcomes"] if item["code"] == "STK001")
    assert "try --tp 1" in finding["first"]["hint"]
    assert report["not_judged"][-1] == (
        f"{len(report['unreached'])} checks were not judged: the run ended in stage logprob"
    )
    assert "inconclusive" not in {item["verdict"] for item in report["outcomes"]}


@pytest.mark.slow
def test_an_engine_that_dies_in_a_worker_of_vllm(tmp_path):
    model = write_tiny("llama", tmp_path / "models")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "hidden_act": "gelu"}))
    report, sentence = report_after(tmp_path, "--model", str(model), "--engine", "vllm")
    assert sentence.startswith("verifier: vllm")
    assert "vllm/model_executor/models/llama.py:" in sentence
    assert "ValueError: Unsupported activation: gelu" in sentence
    assert (report["cause"]["stage"], report["cause"]["owner"]) == ("engine", "the engine")


@pytest.mark.parametrize(("judged", "where"), [(True, ("logprob", 0)), (False, ("train", 1))])
def test_a_training_run_that_dies_in_megatron(tmp_path, trainer_launcher: ForkLauncher, judged, where):
    """A judged run scores a rollout by itself before its step."""
    run = tmp_path / "run"
    words = ["model=tiny:add", "mesh.tp=2", "mesh.dp=1", "steps=1", f"run={run}", "verify.every=0"]
    words += [f"verify.steps={judged}", "evaluation.num_problems=0"]
    config, _ = load(TrainConfig, file=ROOT / "configs" / "add-sft.yaml", overrides=words)
    within = (INJECTED, "norm-wider-than-its-shard", str(tmp_path))
    with started_judge() as judge, pytest.raises(Exception, match="megatron-core") as caught:
        Trainer(config, print, RunEvidence(judge) if judged else SILENT, launcher=trainer_launcher, within=within).run()
    assert caught.value.exit_code == 1
    assert isinstance(caught.value, ViolationFound) is judged
    if not judged:
        leave_failure(config, caught.value)  # as the command does
    report = report_of(store.read(run / "failure"), "t")
    (outcome,) = report.violated
    assert outcome.code == "STK001"
    assert (outcome.finding.first_bad_stage.label, outcome.finding.first.version) == where
