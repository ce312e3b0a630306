"""Training runs of models without a layout row are judged by a derived layout, as those of a family with one are.

What this does not exercise: what such a run catches (tests/faults/test_derived_training.py); gaps (tests/unit/trainer).
"""

from __future__ import annotations

from pathlib import Path

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.faults.training_trial import KNOBS, DeferredJudge
from verifier.launch.fork_launcher import ForkLauncher
from verifier.probes.training.run_evidence import RunEvidence
from verifier.report.report import Report, report_of
from verifier.runs.model_under_test import DERIVED
from verifier.runs.resources import Deadline, Resources
from verifier.trainer.controller import Trainer
from verifier.trainer.replay import replay_step

LIVE = (
    "algorithm=grpo", "data.batch_size=4", "grpo.group_size=4", "grpo.max_answer_tokens=8", "grpo.entropy_weight=0.05",
    "engine.kind=hf",
)  # fmt: skip
RUNS: dict[str, tuple[str, ...]] = {
    "olmoe ep2": ("model=tiny:olmoe", "mesh.ep=2", "mesh.dp=2"),
    "glm4_moe tp2 ep2": ("model=tiny:glm4_moe", "mesh.tp=2", "mesh.ep=2", "mesh.dp=2"),
    "mistral pp2 bf16": ("model=tiny:mistral", "mesh.pp=2", "dtype=bf16"),
    "gemma tp2": ("model=tiny:gemma", "mesh.tp=2"),
    "live mistral dp2": ("model=tiny:mistral", "mesh.dp=2", *LIVE),
}
DERIVING = "deriving the layout from numbered checkpoints"


def _train(resources: Resources, run: Path, *knobs: str) -> tuple[TrainConfig, list[str]]:
    """Train by knobs, and by those of trials that they do not name; returns what was said too."""
    own, said = {text.partition("=")[0] for text in knobs}, list[str]()
    kept = [text for text in KNOBS if text.partition("=")[0] not in own]
    config, _ = load(TrainConfig, overrides=[*kept, *knobs, "verify.steps=true", f"run={run}"])
    launcher = resources.launcher(Deadline(300))
    Trainer(config, said.append, RunEvidence(DeferredJudge()), launcher=launcher, resources=resources).run()
    return config, said


def _reports(run: Path) -> list[Report]:
    """Reports of all steps and of the export, which hold and name the layout."""
    traces = [store.read(path) for path in [*sorted((run / "steps").iterdir()), run / "export"]]
    reports = [report_of(trace, "") for trace in traces]
    bad = [item for report in reports for item in report.outcomes if item.verdict is not Verdict.HOLDS]
    assert not bad, [(item.code, item.verdict.name, item.finding or item.error) for item in bad]
    assert all(trace.manifest.layout == DERIVED for trace in traces)
    return reports


def _codes(report: Report) -> set[str]:
    return {item.code for item in report.outcomes if item.num_compared}


def test_shards_replicas_gradients_and_the_optimizer_are_judged(
    resources: Resources, trainer_launcher: ForkLauncher, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    knobs = ("model=tiny:mistral", "mesh.dp=2", "verify.every=2", "checkpoint.every=1")
    config, said = _train(resources, run, *knobs, "steps=2", "optimizer.schedule=constant")
    assert DERIVING in said
    first, second, export = map(_codes, _reports(run))
    assert {"WGT001", "WGT002", "TRN005", "TRN006"} <= first
    assert {"WGT002", "TRN005", "TRN006", "LSS001", "TRN001"} <= second
    assert {"WGT011", "WGT019"} <= export
    kept = [(item.name, item.stat().st_mtime_ns) for item in (run / "layouts").iterdir()]
    _, said = _train(resources, run, *knobs, "steps=3", "optimizer.schedule=constant")
    assert DERIVING not in said
    assert "WGT002" in _codes(_reports(run)[2])
    said = []
    assert replay_step(config, run, 2, said.append, launcher=trainer_launcher).difference is None
    assert DERIVING not in said
    assert [(item.name, item.stat().st_mtime_ns) for item in (run / "layouts").iterdir()] == kept


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_models_without_a_row(resources: Resources, tmp_path: Path, name: str) -> None:
    _train(resources, tmp_path / "run", *RUNS[name], "verify.every=3")
    *steps, _ = map(_codes, _reports(tmp_path / "run"))
    assert "WGT001" in steps[0]
    assert all("TRN006" in codes for codes in steps)
    assert {"LSS001", "TRN001"} <= steps[2]
    assert ("WGT005" in steps[2]) == ("live" in name)
