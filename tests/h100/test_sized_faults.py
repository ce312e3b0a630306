"""Bugs planted into models of Qwen3-0.6B's widths, caught in their stage in one or two steps of GRPO in bf16 on a GPU.

By default steps 1 and 2 are computed by transformers too, for a few rollouts. Runs without a bug hold. Models have
random weights, so answers differ in reward by a checksum of their text.
"""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.h100 import sized_faults
from tests.h100.sized_faults import SIZED
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.errors import VerifierError
from verifier.faults.fault import Fault, FireCounter, Side
from verifier.faults.training_trial import DeferredJudge
from verifier.probes.training.run_evidence import RunEvidence
from verifier.report.report import Report, report_of
from verifier.runs.resources import Deadline
from verifier.trainer.controller import Trainer

KNOBS = (
    "algorithm=grpo", "dtype=bf16", "mesh.dp=1", "data.source=arithmetic", "data.batch_size=8",
    "batch.max_tokens=8192", "grpo.group_size=4", "grpo.max_answer_tokens=128",
    "grpo.reward=tests.h100.sized_faults:spread", "optimizer.learning_rate=1e-4", "optimizer.warmup_steps=0",
    "optimizer.schedule=constant", "evaluation.num_problems=0", "checkpoint.every=0", "engine.kv_cache_gib=4",
    "verify.steps=true",
)  # fmt: skip
JUDGED = {"LGP001", "LGP003", "LGP009", "LSS001", "LSS002", "LSS007", "TRN001", "WGT005"}
"""Checks that judge by an oracle or by the live weights, all of them in the two steps of a run."""
GIB = 45.0
"""Memory on the GPU at most."""

UNSEEN = {"residual-sums-cut": "one step has LGP003 at 0.42 and LGP009 at 0.33 of their bounds, as without it"}
"""Bugs that nothing caught on one H200, and why as far as it is known; the test of one fails once it is caught."""

pytestmark = [pytest.mark.h100(gpus=1, gib=GIB)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return Path(tmp_path_factory.mktemp("models"))


def shares_of(reports: list[Report]) -> dict[str, float]:
    """Check -> greatest share of a bound that a comparison of a run took."""
    shares = [(item.code, item.shares.greatest) for report in reports for item in report.outcomes if item.shares.count]
    return {code: round(max(share for each, share in shares if each == code), 3) for code, _ in shares}


def trained(resources: Any, model: Path, folder: Path, fault: Fault | None = None) -> tuple[list[Report], int, str]:
    """Reports of a run's steps, how often the bug's code ran, and the error that ended the run early, if one did."""
    run, fire, crashed = folder / "run", FireCounter(mark=folder / "fired-controller"), ""
    first = "steps=1" if fault else "steps=2"
    own = {text.partition("=")[0]: text for text in (*KNOBS, first, *(fault.training if fault else ()))}
    config, _ = load(TrainConfig, overrides=[f"model={model}", *own.values(), f"run={run}"])
    folder.mkdir(exist_ok=True)
    within = (sized_faults.INJECTED, fault.id, str(folder)) if fault and fault.side is Side.TRAINER else ()
    warm: dict[str, Any] = {"launcher": resources.launcher(Deadline(config.timeout_s)), "resources": resources}
    with contextlib.ExitStack() as stack:
        if fault and fault.side is Side.ENGINE:
            stack.enter_context(sized_faults.in_engines(fault, fire))
        try:
            Trainer(config, print, RunEvidence(DeferredJudge()), within=within, **warm).run()
        except VerifierError as problem:
            crashed = str(problem)
    fired = fire.count + sum(int(mark.read_text() or 1) for mark in folder.glob("fired-[0-9]*"))
    shutil.rmtree(run / "hf_model", ignore_errors=True)  # a disk holds those of few runs
    steps = sorted((run / "steps").iterdir()) if (run / "steps").is_dir() else []
    return [report_of(store.read(path), str(path)) for path in steps], fired, crashed


@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_a_run_without_a_bug_holds(kind, runner, models, measured, tmp_path):
    reports, _, crashed = trained(runner.resources, sized_faults.written(kind, models), tmp_path)
    judged = {item.code for report in reports for item in report.outcomes if item.verdict is Verdict.HOLDS}
    gaps = [gap for report in reports for gap in report.not_judged]
    verdicts = [str(report.verdict) for report in reports]
    measured(kind=kind, verdicts=verdicts, judged=sorted(judged), not_judged=gaps, shares=shares_of(reports))
    assert not crashed
    assert [report.verdict for report in reports] == [Verdict.HOLDS] * 2
    assert judged >= JUDGED


@pytest.mark.parametrize("name", SIZED)
def test_a_planted_bug_is_caught_in_its_stage(name, runner, models, measured, tmp_path):
    fault = SIZED[name]
    reports, fired, crashed = trained(runner.resources, sized_faults.written(fault.model, models), tmp_path, fault)
    outcomes = [item for report in reports for item in report.outcomes if item.verdict is Verdict.VIOLATED]
    bad = [item for outcome in outcomes if outcome.finding for item in outcome.finding.bad]
    first = min(bad, key=lambda item: item.place).stage.label if bad else None
    caught = sorted({item.code for item in outcomes})
    shares = shares_of(reports)
    measured(fault=name, fired=fired, caught=caught, first_bad_stage=first, crashed=crashed, shares=shares)
    assert fired
    if name in UNSEEN:
        assert not caught, f"{name} is seen: take it out of UNSEEN"
        return
    assert set(fault.caught_by) <= set(caught)
    assert first == fault.stage.label
