"""Waiting for rollouts that are sampled ahead: as long as the run may take, and no longer."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.errors import InternalError
from verifier.model.checkpoint import open_checkpoint
from verifier.model.tiny import write_tiny
from verifier.runs.resources import Deadline
from verifier.trainer import controller
from verifier.trainer.ahead import AheadRollouts
from verifier.trainer.generation import EngineRollouts

WORDS = ("model=tiny:add", "algorithm=grpo", "grpo.mode=async", "grpo.max_staleness=1", "grpo.ratio_over=engine",
         "evaluation.num_problems=0")  # fmt: skip


def begun(ahead: AheadRollouts, monkeypatch, seconds: float) -> None:
    """Take the first step's rollouts, and have those of the second take so long."""
    batch = SimpleNamespace(facts={})
    monkeypatch.setattr(EngineRollouts, "sample_now", lambda self, step: batch)
    monkeypatch.setattr(EngineRollouts, "handed_on", lambda self, step, batch: ([], ""))
    monkeypatch.setattr(EngineRollouts, "sample", lambda self, step, version: time.sleep(seconds) or batch)
    ahead.rollouts(1)


def test_rewards_that_take_longer_than_a_request_end_no_run(tmp_path, monkeypatch):
    words = [*WORDS, "engine.request_timeout_s=0.1", f"run={tmp_path}/run"]
    trainer = controller.Trainer(load(TrainConfig, overrides=words)[0], lambda text: None)
    trainer._until = Deadline(60)
    trainer._plan_of(SimpleNamespace(checkpoint=open_checkpoint(write_tiny("add", tmp_path)), tier="cpu"))  # type: ignore[arg-type]
    begun(trainer._ahead, monkeypatch, 0.6)
    trainer._ahead.pause()


def test_the_deadline_of_the_run_ends_the_wait(tmp_path, monkeypatch):
    config, _ = load(TrainConfig, overrides=[*WORDS, f"run={tmp_path}/run"])
    ahead = AheadRollouts(config, EngineRollouts(config, open_checkpoint(write_tiny("add", tmp_path))), Deadline(1.0))
    begun(ahead, monkeypatch, 5)
    with pytest.raises(InternalError, match="have not made the rollouts of step 2 before the end of --timeout"):
        ahead.pause()
    with pytest.raises(InternalError, match=r"--timeout is 1 s, which had passed before the rollouts of step 2"):
        ahead.pause()


def test_each_batch_that_is_sampled_ahead_is_taken_by_its_own_step_once(tmp_path, monkeypatch):
    """That of a checkpoint too, by the step after it."""
    config, _ = load(TrainConfig, overrides=[*WORDS, f"run={tmp_path}/run", "steps=6"])
    engine = EngineRollouts(config, open_checkpoint(write_tiny("add", tmp_path)))
    batch = {name: lambda self, step, *given, name=name: SimpleNamespace(facts={}, what=(name, step, *given))
             for name in ("sample_now", "sample", "restored")}  # fmt: skip
    for name, stands_in in batch.items():
        monkeypatch.setattr(EngineRollouts, name, stands_in)
    monkeypatch.setattr(EngineRollouts, "handed_on", lambda self, step, batch: ([batch.what], ""))
    ahead = AheadRollouts(config, engine, Deadline(10))
    taken = [ahead.rollouts(step)[0] for step in (1, 2, 3)]
    assert taken == [[("sample_now", 1)], [("sample", 2, 0)], [("sample", 3, 1)]]
    resumed = AheadRollouts(config, engine, Deadline(10))
    resumed.restore(4, ["kept"])
    assert [resumed.rollouts(step)[0] for step in (4, 5)] == [[("restored", 4, ["kept"])], [("sample", 5, 3)]]
