"""Clean training runs at drawn knobs raise no alarm: three steps of each, judged by all checks.

What this does not exercise: GPUs, Ray, in-flight updates, tools, and combinations that only long runs reach.
"""

from __future__ import annotations

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.dist.drawn_knobs import drawn
from tests.dist.train_clean_case import STEPS
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core import store
from verifier.core.finding import Verdict
from verifier.faults.training_trial import DeferredJudge
from verifier.probes.training.run_evidence import RunEvidence
from verifier.report.report import report_of
from verifier.runs.resources import Deadline
from verifier.trainer.controller import Trainer

NUMBER = 120
"""Of runs."""


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(NUMBER))
def test_a_clean_run_at_drawn_knobs_raises_no_alarm(seed, resources, tmp_path):
    knobs = drawn(seed)
    print(*knobs)
    config, _ = load(TrainConfig, overrides=[*knobs, f"run={tmp_path / 'run'}"])
    launcher = resources.launcher(Deadline(300))
    Trainer(config, lambda text: None, RunEvidence(DeferredJudge()), launcher=launcher, resources=resources).run()
    paths = [*sorted((tmp_path / "run" / "steps").iterdir()), tmp_path / "run" / "export"]
    reports = [report_of(store.read(path), "") for path in paths]
    assert len(reports) == STEPS + 1
    bad = [item for report in reports for item in report.outcomes if item.verdict is not Verdict.HOLDS]
    assert not bad, [(item.code, item.verdict.name, item.finding or item.error) for item in bad]
    assert all(report.verdict is Verdict.HOLDS for report in reports)
