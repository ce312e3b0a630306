"""Trace of a training run that the stack under test ended, and its judgement."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path

from msgspec.structs import replace

from verifier.config.training import TrainConfig
from verifier.core.manifest import Facts
from verifier.core.store import complete, create, fail
from verifier.launch.failures import StackFailed
from verifier.probes.training.step_trace import step_manifest
from verifier.probes.training.verdicts import Judge, require_held
from verifier.runs.ended import record_failure
from verifier.runs.model_under_test import ModelUnderTest, open_model
from verifier.trainer.run_folder import RunFolder
from verifier.trainer.sampled_batch import LogprobLost


@contextlib.contextmanager
def failure_traced(config: TrainConfig, model: ModelUnderTest, folder: RunFolder, judge: Judge) -> Iterator[None]:
    """Have the failure of the stack that ends what is within judged; a trace of an earlier attempt is removed.

    Raises:
        ViolationFound: the judge's report on it, or on the trace of the step whose answers have no log-probabilities.
    """
    shutil.rmtree(folder.failure_trace, ignore_errors=True)
    try:
        yield
    except StackFailed as problem:
        if isinstance(problem, LogprobLost) and problem.step:
            complete_lost(config, model, folder.trace(problem.step), problem.step)
            require_held(judge, folder.trace(problem.step), f"step {problem.step}")
        require_held(judge, _trace_of(config, model, folder, problem), "the failure")
        raise


def leave_failure(config: TrainConfig, problem: StackFailed) -> None:
    """Leave a trace of the failure that ended a run which nobody judged."""
    folder = RunFolder(config.run)
    shutil.rmtree(folder.failure_trace, ignore_errors=True)
    _trace_of(config, open_model(config.model, config.dtype, config.mesh, config.ray.nodes), folder, problem)


def _trace_of(config: TrainConfig, model: ModelUnderTest, folder: RunFolder, problem: StackFailed) -> Path:
    manifest = step_manifest(config, model, Facts(part="failure"))
    trace = create(folder.failure_trace, manifest)
    facts = replace(manifest.facts, stack_failed=record_failure(trace, problem))
    fail(trace, replace(manifest, facts=facts), str(problem))
    return trace


def complete_lost(config: TrainConfig, model: ModelUnderTest, trace: Path, step: int) -> None:
    """Declare the trace of a step that ended so: its rollouts, and the sync before them if that is in it."""
    sent = (trace / "evidence" / "engine-0000.jsonl").exists()
    manifest = step_manifest(config, model, Facts(part="answers", step=step, sent=sent, updates=(step,)))
    complete(trace, replace(manifest, synced_versions=(step - 1,) if sent else ()))
