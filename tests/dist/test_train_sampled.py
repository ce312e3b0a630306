"""Steps that transformers computes too: gradients, Adam and log-probabilities hold on every mesh and loss.

What this does not exercise: the bugs that these checks catch (tests/faults), and meshes with experts.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.errors import UsageError
from verifier.faults.training_trial import GRPO_KNOBS, KNOBS, DeferredJudge
from verifier.oracle.oracle import Oracle, OracleMemoryError
from verifier.probes.training.run_evidence import RunEvidence
from verifier.report.report import report_of
from verifier.runs.resources import Deadline, Resources
from verifier.stages.logprob.records import SampledNoise
from verifier.stages.loss.records import GradientRecord
from verifier.trainer.controller import Trainer
from verifier.trainer.observer import Observer

GRPO = ("algorithm=grpo", *GRPO_KNOBS)
LIVE = ("algorithm=grpo", "grpo.group_size=4", "engine.kind=hf", "data.batch_size=2", "grpo.max_answer_tokens=8")
RUNS: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "sft": ((), set()),
    "sft on dp=2": (("mesh.dp=2",), set()),
    "sft on tp=2": (("mesh.tp=2",), set()),
    "clipped on dp=2": ((*GRPO, "mesh.dp=2", "grpo.kl_weight=0.5", "grpo.entropy_weight=0.01"), {"LGP001"}),
    "gspo on tp=2": (
        (*GRPO, "mesh.tp=2", "grpo.loss=gspo", "grpo.epochs=2", "grpo.clip_low=0.003", "grpo.temperature=0.7"),
        {"LGP001"},
    ),
    "cispo": ((*GRPO, "grpo.loss=cispo", "grpo.epochs=2", "grpo.kl_weight=0.5", "grpo.kl_kind=k2"), {"LGP001"}),
    "live": ((*LIVE, "grpo.temperature=0.8", "grpo.entropy_weight=0.05"), {"LGP001", "LGP003"}),
}
"""Name of a run -> its knobs, and the checks that it has besides those of gradients."""
RARER = ("sft on dp=2", "gspo on tp=2", "cispo")
"""Slow: the kill matrix and the clean runs have their losses and meshes too."""


def train(resources: Resources, run: Path, *knobs: str, default: str = "") -> TrainConfig:
    """Train by knobs, and by those of trials that they and `default` do not name."""
    own = {text.partition("=")[0] for text in knobs} | {default}
    kept = [text for text in ("model=tiny:add", "verify.steps=true", *KNOBS) if text.partition("=")[0] not in own]
    config, _ = load(TrainConfig, overrides=[*kept, *knobs, f"run={run}"])
    launcher = resources.launcher(Deadline(300))
    observer = RunEvidence(DeferredJudge()) if config.verify.steps else Observer()
    Trainer(config, lambda text: None, observer, launcher=launcher, resources=resources).run()
    return config


@pytest.mark.parametrize("name", [*(name for name in RUNS if name not in RARER), *(
    pytest.param(name, marks=pytest.mark.slow) for name in RARER
)])  # fmt: skip
def test_every_sampled_step_holds(name, resources, tmp_path):
    knobs, also = RUNS[name]
    config = train(resources, tmp_path / "run", *knobs, "verify.every=2")
    for step in (1, 2, 3):
        trace = store.read(tmp_path / "run" / "steps" / f"{step:06d}")
        report = report_of(trace, "")
        assert report.verdict is Verdict.HOLDS, [item for item in report.outcomes if item.verdict is not Verdict.HOLDS]
        sampled = {"LSS001", "LSS002", "TRN001", *also}
        assert sampled & {item.code for item in report.outcomes} == (sampled if step == 2 else set())
    updates = {item.update for item in store.read(tmp_path / "run" / "steps" / "000002").of(GradientRecord)}
    assert len(updates) == config.grpo.epochs
    assert not list((tmp_path / "run" / "oracle").iterdir())


@pytest.mark.slow
def test_in_bf16_the_engine_is_judged_from_the_first_sampled_step_on(resources, tmp_path):
    knobs = (*LIVE, "dtype=bf16", "data.batch_size=8", "grpo.entropy_weight=0.05")
    train(resources, tmp_path / "run", *(text for text in knobs if text != "data.batch_size=2"), "verify.every=2")
    reports, noises = [], []
    for step in (1, 2, 3):
        trace = store.read(tmp_path / "run" / "steps" / f"{step:06d}")
        reports.append(report_of(trace, ""))
        noises.append([item.measured for item in trace.of(SampledNoise)])
    assert [item.verdict for item in reports] == [Verdict.HOLDS] * 3
    judged = [next((item for item in report.outcomes if item.code == "LGP009"), None) for report in reports]
    assert [item is not None for item in judged] == [False, True, True]
    assert noises == [[], [1], [1]]
    assert any("LGP009" in text for text in reports[0].not_judged)
    assert not reports[1].not_judged


def test_steps_are_sampled_by_default_and_a_run_without_them_says_so(resources, tmp_path):
    train(resources, tmp_path / "run", default="verify.every")
    train(resources, tmp_path / "none", "verify.every=0", "steps=1", "optimizer.warmup_steps=0")
    traces = [store.read(tmp_path / "run" / "steps" / f"{step:06d}") for step in (1, 2, 3)]
    assert [any(trace.of(GradientRecord)) for trace in traces] == [True, True, False]
    assert [report_of(trace, "").verdict for trace in traces] == [Verdict.HOLDS] * 3
    assert not any(report_of(trace, "").not_judged for trace in traces)
    gaps = report_of(store.read(tmp_path / "none" / "steps" / "000001"), "").not_judged
    assert all(gap.endswith("(verify.every is 0)") for gap in gaps)
    assert {"LSS001", "LSS002", "TRN001"} <= {*re.findall(r"[A-Z]{3}\d{3}", gaps[0])}


def test_a_run_goes_on_where_the_oracle_has_no_room_and_says_what_is_not_judged(resources, tmp_path, monkeypatch):
    asked, ask = [], Oracle.ask

    def without_room(oracle, function, paths, *arguments, **read):
        asked.append(function)
        if "000002" in str(paths[0]) and function != "policy_hf:judge_updates":
            raise OracleMemoryError(f"the fp32 oracle ran out of memory in `{function}`; where")
        return ask(oracle, function, paths, *arguments, **read)

    monkeypatch.setattr(Oracle, "ask", without_room)
    train(resources, tmp_path / "run", *LIVE, "verify.every=1")
    reports = [report_of(store.read(tmp_path / "run" / "steps" / f"{step:06d}"), "") for step in (1, 2, 3)]
    assert [report.verdict for report in reports] == [Verdict.HOLDS] * 3
    assert not reports[0].not_judged
    assert all("the fp32 oracle ran out of memory in `logprob_hf" in " ".join(item.not_judged) for item in reports[1:])
    assert all("where" not in " ".join(item.not_judged) for item in reports)
    assert asked.count("policy_hf:judge_updates") == 2
    assert not list((tmp_path / "run" / "oracle").iterdir())


def test_sampled_steps_without_a_judge_are_refused():
    with pytest.raises(UsageError, match=r"verify\.every is 5 and verify\.steps is false"):
        load(TrainConfig, overrides=["model=tiny:add", "verify.every=5"])


SOME: dict[str, tuple[tuple[str, ...], set[str]]] = {
    "sft on dp=2": (("mesh.dp=2",), set()),
    "clipped on pp=2": (
        (*GRPO, "mesh.pp=2", "grpo.kl_weight=0.5", "grpo.entropy_weight=0.01", "grpo.mini_batches=2"), {"LGP001"}
    ),
    "live": (
        (*LIVE, "grpo.temperature=0.8", "grpo.entropy_weight=0.05", "batch.micro_batch_size=1"),
        {"LGP001", "LGP003", "LGP009", "LGP014"},
    ),
    "in bf16": ((*GRPO, "dtype=bf16", "mesh.dp=2"), {"LGP001"}),
    "own routes in bf16": (("model=tiny:add-moe", "dtype=bf16"), {"LSS005"}),
}  # fmt: skip
"""Name of a run in which two rollouts of each update are computed, its knobs, and further checks that it has."""


@pytest.mark.parametrize("name", SOME)
def test_some_rollouts_are_computed_and_weights_are_those_without_judges(name, resources, tmp_path):
    knobs, also = SOME[name]
    train(resources, tmp_path / "run", *knobs, "verify.every=1", "verify.rollouts=2", "steps=2")
    train(resources, tmp_path / "whole", *knobs, "verify.every=0", "verify.steps=false", "steps=2")
    for step in (1, 2):
        trace = store.read(tmp_path / "run" / "steps" / f"{step:06d}")
        report = report_of(trace, "")
        assert report.verdict is Verdict.HOLDS, [item for item in report.outcomes if item.verdict is not Verdict.HOLDS]
        assert {"LSS001", "LSS002", "LGP012", "TRN001", *also} <= {item.code for item in report.outcomes}
        records = [*trace.of(GradientRecord)]
        assert {item.rollouts for item in records} == {2}
        assert all(item.of_rollouts > 2 for item in records)
    files = [sorted((tmp_path / run / "hf_model").glob("*.safetensors")) for run in ("run", "whole")]
    assert [file.read_bytes() for file in files[0]] == [file.read_bytes() for file in files[1]]
