"""Mixtures of experts in `verifier train`: checkpoints of experts with copies, and routes that are replayed.

What this does not exercise: the bugs that RPL001 catches (tests/faults), what a whole run learns, and routes of
`vllm` on a GPU, of layers behind a dense one, and of more than one engine rank.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.meta.sources import ROOT
from tests.recorded import write_recorded
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.data.recorded import read_recorded
from verifier.errors import UsageError
from verifier.faults.training_trial import DeferredJudge
from verifier.model.checkpoint import open_checkpoint
from verifier.probes.training.run_evidence import RunEvidence
from verifier.report.report import report_of
from verifier.runs.resources import Deadline, Resources
from verifier.stages.replay.faults import ROUTES
from verifier.stages.replay.records import GivenRoutes, UsedRoutes
from verifier.stages.train.records import RouterBalance
from verifier.trainer.controller import Trainer
from verifier.trainer.observer import SILENT

MODEL = ("model=tiny:add-moe", "steps=2", "evaluation.num_problems=0", "batch.micro_batch_size=3")
EXPERTS = {
    "ep2": ("mesh.ep=2", "mesh.dp=4"),
    "ep2 tp2": ("mesh.ep=2", "mesh.dp=2", "mesh.tp=2"),
    "etp2": ("mesh.etp=2", "mesh.dp=2", "mesh.tp=2"),
}
"""Meshes on which each expert has two copies; on the last it is cut in two."""
REPLAY = ("algorithm=grpo", f"data.rollouts={ROUTES}", "grpo.group_size=4", "grpo.replay_routes=true")


def train(resources: Resources, run: Path, *knobs: str) -> None:
    given = {text.partition("=")[0]: text for text in (*MODEL, *knobs, f"run={run}")}  # the last of each counts
    config, _ = load(TrainConfig, overrides=[*given.values()])
    launcher = resources.launcher(Deadline(300))
    observer = RunEvidence(DeferredJudge()) if config.verify.steps else SILENT
    Trainer(config, lambda text: None, observer, launcher=launcher, resources=resources).run()


def weights(run: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in sorted((run / "hf_model").glob("*.safetensors"))}


def not_held(run: Path, step: int) -> list[str]:
    report = report_of(store.read(run / "steps" / f"{step:06d}"), "")
    return [item.code for item in report.outcomes if item.verdict is not Verdict.HOLDS]


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["ep2", "ep2 tp2", "etp2"])
def test_a_resumed_mixture_has_the_bits_of_one_that_was_not_stopped(mesh, resources, tmp_path):
    knobs = (*EXPERTS[mesh], "data.batch_size=16", "verify.steps=true")
    train(resources, tmp_path / "whole", *knobs)
    train(resources, tmp_path / "stopped", *knobs, "steps=1")
    train(resources, tmp_path / "stopped", *knobs)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole") != {}
    assert not_held(tmp_path / "stopped", 2) == []


@pytest.mark.slow
def test_a_score_bias_moves_resumes_and_is_exported_bit_by_bit(resources, tmp_path):
    """In several buckets of gradients that end in padding, which megatron-core alone mistakes (Megatron-LM #5077)."""
    knobs = (
        "model=tiny:add-deepseek", "megatron.moe_bias_update_rate=0.001", "mesh.ep=2", "mesh.dp=2",
        "data.batch_size=8", "verify.steps=true",
    )  # fmt: skip
    train(resources, tmp_path / "whole", *knobs)
    train(resources, tmp_path / "stopped", *knobs, "steps=1")
    train(resources, tmp_path / "stopped", *knobs)
    assert weights(tmp_path / "stopped") == weights(tmp_path / "whole") != {}
    assert not_held(tmp_path / "stopped", 2) == []
    last = store.read(tmp_path / "whole" / "steps" / "000002")
    saved = open_checkpoint(tmp_path / "whole" / "hf_model")
    for item in last.of(RouterBalance):
        after = last.array(item, "after")
        assert (after != last.array(item, "before")).any()
        for row, layer in enumerate(item.layers):
            exported = saved.read(f"model.layers.{layer}.mlp.gate.e_score_correction_bias")
            assert exported.numpy().tobytes() == after[row].tobytes()


@pytest.mark.slow
def test_a_bf16_run_finds_that_upstream_counts_tokens_in_bf16(resources, tmp_path):
    knobs = (
        "model=tiny:add-deepseek", "megatron.moe_bias_update_rate=0.001", "dtype=bf16", "steps=1", "data.batch_size=8",
        "verify.steps=true",
    )  # fmt: skip
    train(resources, tmp_path / "shipped", *knobs)
    assert not_held(tmp_path / "shipped", 1) == ["TRN004"]
    train(resources, tmp_path / "fixed", *knobs, "fixes=[megatron-7081]")
    assert not_held(tmp_path / "fixed", 1) == []


def test_every_pass_replays_the_routes_and_holds(resources, tmp_path):
    knobs = (*REPLAY, "mesh.ep=2", "mesh.dp=2", "grpo.mini_batches=2", "grpo.epochs=2", "grpo.kl_weight=0.1")
    train(resources, tmp_path / "run", *knobs, "verify.steps=true", "verify.every=2")
    for step in (1, 2):
        assert not_held(tmp_path / "run", step) == []
    trace = store.read(tmp_path / "run" / "steps" / "000001")
    assert [item.passes for item in trace.of(GivenRoutes)] == [
        ("old", "reference", "update 1", "update 3"), ("old", "reference", "update 2", "update 4")
    ]  # fmt: skip
    assert {item.during for item in trace.of(UsedRoutes)} == {"old", "reference", *(f"update {n}" for n in range(1, 5))}


def test_a_step_whose_every_group_is_dropped_records_no_routes(resources, tmp_path):
    folder = tmp_path / "rollouts"
    folder.mkdir()
    rows = read_recorded(ROUTES / "000001.jsonl")
    firsts = {row.group: row for row in reversed(rows)}  # all answers to a prompt are its first one
    write_recorded(folder / "000001.jsonl", [replace(firsts[row.group], id=row.id) for row in rows])
    knobs = (*REPLAY, f"data.rollouts={folder}", "steps=1", "grpo.drop_zero_variance=true", "verify.steps=true")
    train(resources, tmp_path / "run", *knobs)
    assert not [*store.read(tmp_path / "run" / "steps" / "000001").of(GivenRoutes)]
    assert not_held(tmp_path / "run", 1) == []


@pytest.mark.parametrize("recompute", [pytest.param("none", marks=pytest.mark.slow), "full"])
def test_the_first_ratio_is_exactly_one_with_four_experts_a_token(recompute, resources, tmp_path):
    """megatron-core adds up their weights in another order where there are no gradients, unless its routers sort."""
    knobs = ("model=tiny:qwen3-moe", "algorithm=grpo", f"data.rollouts={ROUTES.parent}", "grpo.group_size=4")
    more = ("steps=1", f"megatron.recompute={recompute}", "megatron.moe_z_loss=0.001", "verify.steps=true")
    train(resources, tmp_path / "run", *knobs, *more)
    trace = store.read(tmp_path / "run" / "steps" / "000001")
    outcomes = {item.code: item.verdict for item in report_of(trace, "").outcomes}
    assert outcomes["LSS003"] is Verdict.HOLDS
    assert not_held(tmp_path / "run", 1) == []
    assert any("order of a token's experts" in words for words in trace.manifest.stand_ins)


def test_recorded_rollouts_whose_routes_cannot_be_replayed_are_refused(resources, tmp_path):
    first, *others = read_recorded(ROUTES / "000001.jsonl")
    assert first.routes is not None
    rows = {
        "has no routes": None,
        r"other sizes than the model's, \[layers, experts per token\] = \[4, 2\]": tuple(
            token[:-1] for token in first.routes
        ),
        "are not different experts below 8": ((((8, 1),) * 4), *first.routes[1:]),
    }
    for number, (why, routes) in enumerate(rows.items()):
        folder = tmp_path / str(number)
        folder.mkdir()
        write_recorded(folder / "000001.jsonl", [replace(first, routes=routes), *others])
        with pytest.raises(UsageError, match=why):
            train(resources, tmp_path / "run", *REPLAY, f"data.rollouts={folder}", "steps=1")


@pytest.mark.slow
def test_a_live_engine_reports_the_routes(tmp_path):
    words = ["steps=2", "first=null", "data.batch_size=8", "evaluation.num_problems=8", "--run", str(tmp_path / "run")]
    command = [sys.executable, "-m", "verifier", "train", "configs/add-moe.yaml", "--verify", *words]
    done = subprocess.run(
        [*command, "grpo.drop_zero_variance=false"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr + done.stdout
    assert "2 steps judged, all hold" in done.stdout
