"""One step of the longest samples before a long run: what it trains on, what it says, and that a bug stops it.

What this does not exercise: vLLM (the command's page has a run with it), and memory of GPUs.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.cli.train import judge_step
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.errors import UsageError, ViolationFound
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import FireCounter
from verifier.faults.training_trial import GRPO_KNOBS
from verifier.model.checkpoint import open_checkpoint
from verifier.probes.training.verdicts import Judged
from verifier.runs.preflight import Preflight, preflight
from verifier.stages.loss.records import GradientRecord
from verifier.trainer.update_log import read

SFT = ("steps=600", "mesh.dp=2", "optimizer.schedule=cosine", "optimizer.warmup_steps=50", "data.batch_size=6")
LIVE = (
    "algorithm=grpo", "engine.kind=hf", "data.batch_size=4", "grpo.group_size=4", "grpo.max_answer_tokens=24",
    "grpo.drop_overlong=true", "grpo.drop_zero_variance=true", "grpo.epochs=2",
)  # fmt: skip


class HereAndNow:
    """A judge in this process."""

    def submit(self, trace: Path) -> Future[Judged]:
        done: Future[Judged] = Future()
        done.set_result(judge_step(str(trace)))
        return done

    def pack(self, trace: Path, *, records: bool = True) -> None:
        store.pack(trace, [*(trace.parent.parent / "batches").glob(f"{trace.name}-*")], records=records)


def tried(launcher, run: Path, *knobs: str) -> Preflight:
    config, _ = load(TrainConfig, overrides=["model=tiny:add", *knobs, f"run={run}"])
    return preflight(config, print, HereAndNow(), launcher=launcher)


@pytest.fixture
def examples(tmp_path) -> Iterator[str]:
    """Sums of ever more summands: the longest are the last; `####`, digits and the end are 5 tokens."""
    file = tmp_path / "sums.jsonl"
    rows = [{"id": f"sum-{n}", "prompt": "+".join(["11"] * n) + "=", "response": f"####{11 * n}"} for n in range(1, 20)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(file)


@pytest.mark.slow
def test_sft_trains_a_full_batch_of_the_longest_examples(trainer_launcher, tmp_path, examples):
    run = tmp_path / "run"
    found = tried(trainer_launcher, run, *SFT, f"data.source={examples}", "evaluation.num_problems=0")
    chosen = [json.loads(line)["id"] for line in (run / "longest.jsonl").read_text().splitlines()]
    assert chosen == [f"sum-{n}" for n in range(19, 13, -1)]
    assert (found.samples, found.longest) == (6, 1 + 19 * 3 + 5)
    assert len(found.peak_memory) == 2
    assert min(found.peak_memory) > 2**26
    assert {"prepare", "train", "time"} == found.seconds.keys()
    assert any(store.read(run / "steps" / "000001").of(GradientRecord))
    assert (len(read(run, 1)), (run / "hf_model").is_dir()) == (1, True)


@pytest.mark.slow
def test_every_answer_of_grpo_has_the_greatest_length_and_is_in_the_loss(trainer_launcher, tmp_path):
    run = tmp_path / "run"
    found = tried(trainer_launcher, run, *LIVE)
    metrics = json.loads((run / "metrics.jsonl").read_text())
    assert (found.samples, metrics["answer_tokens"], metrics["num_tokens"]) == (16, 24.0, 2 * 16 * 24)
    assert metrics["grad_norm"] > 0
    assert {"rollout", "score", "prepare", "train", "sync", "time"} == found.seconds.keys()
    assert metrics["rollout_tokens_per_s"] == pytest.approx(16 * 24 / metrics["rollout_s"])
    weights = open_checkpoint(run / "hf_model")
    assert metrics["sent_gb"] == pytest.approx(sum(weights.read(name).nbytes for name in weights.names()) / 1e9)
    assert metrics["transfer_gb_per_s"] == pytest.approx(metrics["sent_gb"] / metrics["transfer_s"])
    assert metrics["transfer_s"] <= metrics["sync_s"]


@pytest.mark.slow
def test_recorded_rollouts_are_the_longest_file(trainer_launcher, tmp_path):
    folder = Path(GRPO_KNOBS[0].partition("=")[2])
    found = tried(trainer_launcher, tmp_path / "run", "algorithm=grpo", *GRPO_KNOBS, "steps=3")
    lengths = [len(row["prompt"]) + len(row["response"]) for file in folder.glob("*.jsonl")
               for row in map(json.loads, file.read_text().splitlines())]  # fmt: skip
    assert found.longest == max(lengths)


@pytest.mark.slow
def test_what_the_oracle_has_not_is_said_and_the_rest_is_judged(trainer_launcher, tmp_path):
    found = tried(trainer_launcher, tmp_path / "run", *SFT, "dtype=bf16", "megatron.grad_reduce_in_fp32=false")
    assert any("grad_reduce_in_fp32 is false, which the oracle does not compute" in note for note in found.notes)


@pytest.mark.slow
def test_a_bug_stops_it_and_its_report_says_where(trainer_launcher, tmp_path):
    fault, fire = CATALOG["prompt-trained-on"], FireCounter()
    with fault.inject(fire), pytest.raises(ViolationFound, match="DAT00"):
        tried(trainer_launcher, tmp_path / "run", *SFT)
    assert fire.count
    assert (tmp_path / "run" / "steps" / "000001").is_dir()


def test_what_a_run_is_refused_for_is_refused_before_anything_is_written(trainer_launcher, tmp_path):
    with pytest.raises(UsageError, match="recompute_layers is 3"):
        tried(
            trainer_launcher, tmp_path / "run", *SFT, "mesh.pp=2", "megatron.recompute=full",
            "megatron.recompute_layers=3",
        )  # fmt: skip
    assert not (tmp_path / "run").exists()
