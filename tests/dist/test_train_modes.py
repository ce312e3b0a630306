"""GRPO with a live vLLM in each mode: rollouts a version behind, and weights that reach requests which run.

What this does not exercise: the bugs that the checks catch (tests/faults), engines of several ranks, GPUs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.core.trace import Trace
from verifier.faults.training_trial import DeferredJudge
from verifier.probes.training.run_evidence import RunEvidence
from verifier.report.report import report_of
from verifier.runs.resources import Deadline, Resources
from verifier.stages.advantage.records import Advantages, PolicyColumns
from verifier.stages.data.records import DataOrder
from verifier.stages.logprob.records import OracleOfSampled
from verifier.stages.rollout.records import SampledTokens
from verifier.trainer.controller import Trainer

STEPS = 3
LIVE = (
    "model=tiny:add", "algorithm=grpo", f"steps={STEPS}", "data.batch_size=4", "grpo.group_size=4",
    "grpo.max_answer_tokens=8", "grpo.max_staleness=1", "grpo.ratio_over=engine", "grpo.entropy_weight=0.05",
    "evaluation.num_problems=0", "verify.steps=true", "verify.every=1",
)  # fmt: skip
MODES = {
    "async": ("grpo.mode=async",),
    "recomputed": ("grpo.mode=inflight", "grpo.inflight_steps=3"),
    "kept": ("grpo.mode=inflight", "grpo.inflight_steps=3", "grpo.keep_kv_cache=true"),
}
"""Name of a run -> its knobs."""


def train(resources: Resources, folder: Path, knobs: Sequence[str]) -> Path:
    config, _ = load(TrainConfig, overrides=[*knobs, f"run={folder}"])
    launcher = resources.launcher(Deadline(300))
    Trainer(config, lambda text: None, RunEvidence(DeferredJudge()), launcher=launcher, resources=resources).run()
    return folder


@pytest.fixture(scope="module")
def run(resources, tmp_path_factory):
    found: dict[str, Path] = {}

    def once(name: str) -> Path:
        if name not in found:
            found[name] = train(resources, tmp_path_factory.mktemp("modes") / "run", [*LIVE, *MODES[name]])
        return found[name]

    return once


def traces(folder: Path) -> list[Trace]:
    return [store.read(folder / "steps" / f"{step:06d}") for step in range(1, STEPS + 1)]


def versions(trace: Trace) -> list[np.ndarray]:
    """Version of each sampled token of each rollout."""
    (item,) = trace.of(PolicyColumns)
    rows = np.split(trace.array(item, "version"), np.cumsum(item.lengths)[:-1])
    return [row[row >= 0] for row in rows]


def require_held(folder: Path, *codes: str) -> None:
    """Every step holds, and was judged by these checks among others."""
    for trace in traces(folder):
        report = report_of(trace, "")
        assert report.verdict is Verdict.HOLDS, [item for item in report.outcomes if item.verdict is not Verdict.HOLDS]
        assert set(codes) <= {item.code for item in report.outcomes}


@pytest.mark.parametrize("name", MODES)
def test_every_step_holds(name, run):
    require_held(run(name), "LGP001", "LGP003", "ADV003", "DAT004")


@pytest.mark.parametrize("name", MODES)
def test_no_token_is_over_the_bound(name, run):
    for step, trace in enumerate(traces(run(name)), 1):
        found = np.concatenate(versions(trace))
        assert (step - 1 - found).min() >= 0
        assert (step - 1 - found).max() == (0 if step == 1 else 1)


def test_async_rollouts_are_a_version_behind(run):
    for step, trace in enumerate(traces(run("async")), 1):
        assert {int(item) for row in versions(trace) for item in row} == {max(step - 2, 0)}


@pytest.mark.parametrize("name", ["recomputed", "kept"])
def test_an_update_reaches_requests_between_two_of_their_tokens(name, run):
    for step, trace in enumerate(traces(run(name)), 1):
        if step > 1:
            assert all((row[:3] == step - 2).all() and (row[3:] == step - 1).all() for row in versions(trace))
            assert any(len(row) > 3 for row in versions(trace))


def test_recomputed_tokens_are_each_within_the_bound_of_the_oracle_of_their_version(run):
    for step, trace in enumerate(traces(run("recomputed")), 1):
        judged = {item.version for item in trace.of(OracleOfSampled)}
        assert judged == ({0} if step == 1 else {step - 2, step - 1})
        for item in trace.of(SampledTokens):
            (oracle,) = trace.of(OracleOfSampled, version=item.version)
            assert np.abs(trace.array(item) - trace.array(oracle)).max() < 1e-5
        (policy,) = trace.of(PolicyColumns)
        sampled = sum(len(row) for row in versions(trace))
        assert (
            sum(sum(item.lengths) for item in trace.of(SampledTokens))
            == sampled
            == sum(policy.lengths) - int(np.isnan(trace.array(policy, "engine")).sum())
        )


def test_kept_keys_are_of_the_old_weights_and_not_judged_as_the_new(run):
    for step, trace in enumerate(traces(run("kept")), 1):
        assert {item.version for item in trace.of(SampledTokens)} == {max(step - 2, 0)}


@pytest.mark.parametrize("name", MODES)
def test_metrics_tell_the_age_of_tokens(name, run):
    lines = [json.loads(line) for line in (run(name) / "metrics.jsonl").read_text().splitlines()]
    assert [line["staleness"] > 0 for line in lines] == [False, True, True]
    assert [line["dropped_stale"] for line in lines] == [0.0, 0.0, 0.0]


AHEAD = {"async": ("grpo.mode=async",), "inflight": ("grpo.mode=inflight", "grpo.inflight_steps=2")}
"""Name of a run that samples two batches ahead -> its knobs."""


@pytest.mark.parametrize("name", AHEAD)
def test_two_batches_ahead_each_token_names_its_weights_and_a_resume_ends_with_the_same_bits(name, resources, tmp_path):
    words = [text for text in LIVE if not text.startswith(("steps=", "grpo.max_staleness="))]
    knobs = [*words, *AHEAD[name], "steps=6", "grpo.max_staleness=2", "checkpoint.every=2", "checkpoint.keep=9"]
    whole = train(resources, tmp_path / "whole", knobs)
    found = [store.read(whole / "steps" / f"{step:06d}") for step in range(1, 7)]
    for step, trace in enumerate(found, 1):
        assert report_of(trace, "").verdict is Verdict.HOLDS
        ages = {int(step - 1 - item) for row in versions(trace) for item in row}
        assert max(ages) == min(step - 1, 2)
        assert name == "inflight" or len(ages) == 1
    assert name == "async" or any({*row.tolist()} == {2, 3, 4} for row in versions(found[4]))
    assert not [*(whole / "oracle").iterdir()]
    stopped = tmp_path / "run"
    shutil.copytree(whole, stopped)
    for step in (4, 6):
        shutil.rmtree(stopped / "checkpoints" / f"{step:06d}")
    shutil.rmtree(stopped / "hf_model")
    (stopped / "finished.json").unlink(missing_ok=True)
    train(resources, stopped, knobs)
    for file in (whole / "hf_model").glob("*.safetensors"):
        assert file.read_bytes() == (stopped / "hf_model" / file.name).read_bytes()
    for step in range(1, 7):
        one, other = (store.read(run / "steps" / f"{step:06d}") for run in (whole, stopped))
        assert [item.ids for item in one.of(PolicyColumns)] == [item.ids for item in other.of(PolicyColumns)]
        assert report_of(other, "").verdict is Verdict.HOLDS


@pytest.mark.slow
@pytest.mark.parametrize(
    "mode", ["sync", *(pytest.param(name, marks=pytest.mark.slow) for name in ("async", "inflight"))]
)
def test_groups_without_variance_are_replaced_up_to_the_limit(mode, resources, tmp_path):
    ahead = () if mode == "sync" else (f"grpo.mode={mode}", "grpo.max_staleness=1", "grpo.ratio_over=engine")
    kept = [text for text in LIVE if text not in ("grpo.max_staleness=1", "grpo.ratio_over=engine", "verify.every=1")]
    rounds = ("grpo.max_sampling_rounds=3", "grpo.reward=operator:gt", "engine.kind=hf", "grpo.group_size=3")
    given = [*(text for text in kept if text != "grpo.group_size=4"), *ahead, *rounds]
    folder = train(resources, tmp_path / "run", given)
    require_held(folder, "DAT009")
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert sum(line["replaced_groups"] for line in lines) > 0
    for trace, line in zip(traces(folder), lines, strict=True):
        rounds = [item.round for item in trace.of(DataOrder)]
        assert len(rounds) == line["sampling_rounds"] <= 3
        assert rounds == list(range(len(rounds)))
        (batch,) = trace.of(Advantages)
        assert len(set(batch.groups)) == 4
        assert len(batch.ids) == 12
