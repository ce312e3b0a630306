"""TRN002 on the settings of the optimizer beside those that the manifest's config asks for."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import make_trace
from tests.snapshots.training_traces import training
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.trace import Trace
from verifier.stages.train.records import OptimizerSettings, TrainerStep
from verifier.trainer.ranks import optimizer_settings

KNOBS = ("model=tiny:add", "run=nowhere", "steps=3", "optimizer.schedule=linear", "optimizer.warmup_steps=1")
UPDATES = ("algorithm=grpo", "grpo.mini_batches=2", "grpo.epochs=2")


def judged(knobs, **wrong):
    config, _ = load(TrainConfig, overrides=[*KNOBS, *knobs])
    asked = OptimizerSettings(name="Adam", version=1, **{**optimizer_settings(config), **wrong})
    rate = asked.learning_rate
    reports = [
        replace(item, learning_rate=rate, weight_decay=0.0, groups=())
        for item in training()
        if isinstance(item, TrainerStep)
    ]
    trace = make_trace([asked, *reports])
    told = Trace(replace(trace.manifest, config=config.to_dict()), trace.records)
    outcome = run_check(REGISTRY["TRN002"], told)
    assert outcome.error is None
    return outcome.verdict, outcome.finding and outcome.finding.first.sentence


@pytest.mark.parametrize("knobs", [(), UPDATES, ("grpo.epochs=2",), ("algorithm=grpo", "grpo.epochs=3")])
def test_what_the_config_asks_for_holds(knobs):
    assert judged(knobs) == (Verdict.HOLDS, None)


def test_an_end_in_batches_is_seen():
    assert judged(UPDATES, decay_steps=3) == (
        Verdict.VIOLATED,
        "decay_steps of the schedule is 3 (the optimizer's settings), it should be 12 (the manifest's config)",
    )


def test_an_end_in_updates_of_fine_tuning_is_seen():
    assert judged(("grpo.epochs=2",), decay_steps=6)[0] is Verdict.VIOLATED


def test_another_schedule_is_seen():
    assert judged((), least_learning_rate=1e-4) == (
        Verdict.VIOLATED,
        "least_learning_rate of the schedule is 0.0001 (the optimizer's settings), it should be 0 (the "
        "manifest's config)",
    )
