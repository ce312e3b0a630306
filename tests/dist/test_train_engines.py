"""GRPO runs whose engine dies, and runs ahead that are stopped: they end with the bits of a run that went through.

What this does not exercise: engines on GPUs, whose death ends the run, and of a cluster (test_train_ray.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.dist.engine_kills import killed
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.errors import InternalError
from verifier.faults.training_trial import DeferredJudge
from verifier.probes.training.run_evidence import RunEvidence
from verifier.report.report import report_of
from verifier.runs.resources import Deadline
from verifier.stages.checkpoint.records import LoadedState
from verifier.stages.engine.records import EngineRestart, SyncedTensor
from verifier.trainer.controller import Trainer
from verifier.trainer.engines import RESTARTS

pytestmark = pytest.mark.slow

STEPS = 3
KNOBS = (
    "model=tiny:add", "algorithm=grpo", f"steps={STEPS}", "data.batch_size=4", "grpo.group_size=4",
    "grpo.max_answer_tokens=8", "grpo.entropy_weight=0.05", "verify.steps=true",
)  # fmt: skip
EVALUATED = ("evaluation.num_problems=4", "evaluation.every=2")


@pytest.fixture(scope="module")
def train(resources):
    def run(folder: Path, *knobs: str, within: Sequence[str] = ()) -> list[str]:
        lines: list[str] = []
        config, _ = load(TrainConfig, overrides=[*KNOBS, *knobs, f"run={folder}"])
        launcher = resources.launcher(Deadline(300))
        evidence = RunEvidence(DeferredJudge())
        Trainer(config, lines.append, evidence, launcher=launcher, resources=resources, within=within).run()
        return lines

    return run


@pytest.fixture(scope="module", params=[pytest.param("vllm", marks=pytest.mark.slow), "hf"])
def whole(request, train, tmp_path_factory):
    """Kind of the engine, and weights of a run without a death."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    train(folder, f"engine.kind={request.param}", *EVALUATED)
    return request.param, weights(folder)


def weights(folder: Path) -> bytes:
    return b"".join(file.read_bytes() for file in sorted((folder / "hf_model").glob("*.safetensors")))


def restarts(lines: Sequence[str]) -> int:
    return sum("starting it again" in line for line in lines)


def require_held(folder: Path, *looked_at: int) -> None:
    """Every step holds, and engines that were started again were looked at in these."""
    found = []
    for step in range(1, STEPS + 1):
        trace = store.read(folder / "steps" / f"{step:06d}")
        report = report_of(trace, "")
        assert report.verdict is Verdict.HOLDS, [item for item in report.outcomes if item.verdict is not Verdict.HOLDS]
        found += [step] if any(trace.of(EngineRestart)) else []
    assert found == [*looked_at]


def require_same_end(train: Callable[..., list[str]], folder: Path, request_: str, number: int, *knobs: str) -> None:
    """A run in which an engine dies once, at a request by number, ends with the weights of one that went through."""
    train(folder / "whole", *knobs)
    if request_ == "generate":
        with killed(request_, number):
            lines = train(folder / "run", *knobs)
    else:
        within = ["tests.dist.engine_kills:killed_by_rank_0", request_, str(number), str(folder / "mark")]
        lines = train(folder / "run", *knobs, within=within)
    assert restarts(lines) == 1
    assert weights(folder / "run") == weights(folder / "whole")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "times", "step"),
    [(3, 1, 1), (4, 1, 2), (6, RESTARTS, 3)],
    ids=["first step", "second step", "evaluation, three times"],
)
def test_an_engine_that_dies_while_it_samples(number, times, step, whole, train, tmp_path):
    """The evaluation before the first step asks twice."""
    kind, expected = whole
    with killed("generate", number, times) as pids:
        lines = train(tmp_path / "run", f"engine.kind={kind}", *EVALUATED)
    assert len(pids) == len(set(pids)) == times == restarts(lines)
    assert weights(tmp_path / "run") == expected
    require_held(tmp_path / "run", step)


@pytest.mark.parametrize(
    ("request_", "number"),
    [
        ("receive", 3),
        pytest.param("begin_update", 3, marks=pytest.mark.slow),
        pytest.param("poison", 2, marks=pytest.mark.slow),
        pytest.param("checkpoint_view", 2, marks=pytest.mark.slow),
        pytest.param("connect", 1, marks=pytest.mark.slow),
    ],
)
def test_an_engine_that_dies_during_a_sync(request_, number, whole, train, tmp_path):
    """The sync that is repeated leaves its evidence, the first one's too, so that nobody has to look at the engine."""
    kind, expected = whole
    mark = tmp_path / "mark"
    within = ["tests.dist.engine_kills:killed_by_rank_0", request_, str(number), str(mark)]
    lines = train(tmp_path / "run", f"engine.kind={kind}", *EVALUATED, within=within)
    assert mark.read_text() == "1"
    assert restarts(lines) == 1
    assert weights(tmp_path / "run") == expected
    require_held(tmp_path / "run")
    assert store.read(tmp_path / "run" / "steps" / "000001").versions(SyncedTensor) == [0, 1]


@pytest.mark.slow
def test_one_death_too_many_ends_the_run(train, tmp_path):
    with killed("generate", 1, RESTARTS + 1), pytest.raises(InternalError, match=f"after {RESTARTS} restarts"):
        train(tmp_path / "run", "engine.kind=hf", "evaluation.num_problems=0")


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "inflight"])
def test_two_engines_sample_what_one_samples(mode, train, tmp_path):
    knobs = ["engine.kind=hf", "evaluation.num_problems=0", f"grpo.mode={mode}"]
    if mode == "inflight":
        knobs += ["grpo.inflight_steps=3", "grpo.max_staleness=1", "grpo.ratio_over=engine"]
    train(tmp_path / "one", *knobs)
    train(tmp_path / "two", *knobs, "engine.replicas=2")
    assert weights(tmp_path / "two") == weights(tmp_path / "one")
    require_held(tmp_path / "two")
    synced = [*store.read(tmp_path / "two" / "steps" / "000001").of(SyncedTensor)]
    assert {item.rank for item in synced} == {0, 1}
    assert len({(item.version, item.name, item.digest) for item in synced}) == 2 * len({item.name for item in synced})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("request_", "number", "looked_at"), [("generate", 2, [1]), ("receive", 2, []), ("connect", 2, [])]
)
def test_one_of_two_engines_dies(request_, number, looked_at, train, tmp_path):
    knobs = ["engine.kind=hf", "engine.replicas=2", "evaluation.num_problems=0"]
    require_same_end(train, tmp_path, request_, number, *knobs)
    require_held(tmp_path / "run", *looked_at)


class Stopped(Exception):
    """The end of a run after its second step."""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["async", "inflight"])
def test_a_run_ahead_goes_on_with_the_batch_that_it_had_sampled(mode, train, resources, tmp_path):
    knobs = [
        "engine.kind=hf", f"grpo.mode={mode}", "grpo.max_staleness=1", "grpo.ratio_over=engine", "checkpoint.every=1",
        "evaluation.num_problems=0", "verify.every=3", *(["grpo.inflight_steps=3"] if mode == "inflight" else []),
    ]  # fmt: skip
    train(tmp_path / "whole", *knobs)

    def stop(text: str) -> None:
        if text.startswith("step 2:"):
            raise Stopped

    config, _ = load(TrainConfig, overrides=[*KNOBS, *knobs, f"run={tmp_path / 'run'}"])
    launcher = resources.launcher(Deadline(300))
    with pytest.raises(Stopped):
        Trainer(config, stop, RunEvidence(DeferredJudge()), launcher=launcher, resources=resources).run()
    assert any("continuing from the checkpoint" in line for line in train(tmp_path / "run", *knobs))
    assert weights(tmp_path / "run") == weights(tmp_path / "whole")
    require_held(tmp_path / "run")
    traces = [store.read(tmp_path / "run" / "steps" / f"{step:06d}") for step in range(1, STEPS + 1)]
    loaded = [names for trace in traces if (names := {item.name for item in trace.of(LoadedState)})]
    assert len(loaded) == 1
    assert "data/rollouts" in loaded[0]


@pytest.mark.slow
@pytest.mark.parametrize(("request_", "number"), [("generate", 2), ("load_adapter", 2), ("checkpoint_view", 2)])
def test_an_engine_with_an_adapter_dies(request_, number, train, tmp_path):
    knobs = ["lora.rank=8", "optimizer.learning_rate=1.0e-3", "evaluation.num_problems=0"]
    require_same_end(train, tmp_path, request_, number, *knobs)
    require_held(tmp_path / "run", *([2] if request_ == "generate" else []))
