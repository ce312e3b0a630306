"""Trace of a training run that the stack under test ended, and its judgement."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator

from msgspec.structs import replace

from verifier.config.training import TrainConfig
from verifier.core.manifest import Facts
from verifier.core.store import create, fail
from verifier.launch.stack_failure import StackFailed
from verifier.runs.ended import record_failure
from verifier.runs.model_under_test import ModelUnderTest
from verifier.trainer.lost_logprobs import LogprobLost, complete_lost
from verifier.trainer.run_folder import RunFolder
from verifier.trainer.step_trace import step_manifest
from verifier.trainer.verdicts import Judge, require_held


@contextlib.contextmanager
def failure_traced(
    config: TrainConfig, model: ModelUnderTest, folder: RunFolder, judge: Judge | None
) -> Iterator[None]:
    """Leave a trace of the failure of the stack that ends what is within; one of an earlier attempt is removed.

    Raises:
        ViolationFound: the judge's report on it, or on the trace of the step whose answers have no log-probabilities.
        StackFailed: the failure itself, without a judge.
    """
    shutil.rmtree(folder.failure_trace, ignore_errors=True)
    try:
        yield
    except StackFailed as problem:
        if judge is not None and isinstance(problem, LogprobLost) and problem.step:
            complete_lost(config, model, folder.trace(problem.step), problem.step)
            require_held(judge, folder.trace(problem.step), f"step {problem.step}")
        manifest = step_manifest(config, model, Facts(part="failure"))
        trace = create(folder.failure_trace, manifest)
        facts = replace(manifest.facts, stack_failed=record_failure(trace, problem))
        fail(trace, replace(manifest, facts=facts), str(problem))
        if judge is not None:
            require_held(judge, trace, "the failure")
        raise
