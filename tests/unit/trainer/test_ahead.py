"""Batches that are sampled ahead: waited for as long as the run may take, taken once, and told by their versions."""

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
    resumed.restore(4, [["kept"]])
    assert [resumed.rollouts(step)[0] for step in (4, 5)] == [[("restored", 4, ["kept"])], [("sample", 5, 3)]]


class Engine:
    """Stands in for `EngineRollouts`: a batch is the versions that its tokens claim, a token a window of the engine.

    What was begun is in `begun`, in order, and what was finished in `done`.
    """

    def __init__(self) -> None:
        self.begun, self.done = list[tuple[int, bool]](), list[int]()

    def batch(self, versions):
        return SimpleNamespace(facts={}, versions=[*versions], saved=lambda: [{"versions": [*versions]}])

    def sample_now(self, step):
        self.done.append(step)
        return self.batch([step - 1])

    def sample(self, step, version):
        self.done.append(step)
        return self.batch([version])

    def begin(self, step, last):
        self.begun.append((step, last))

    def finish(self, step, held):
        self.done.append(step)
        return self.batch(held)

    def restored(self, step, rounds):
        return self.batch(rounds[0]["versions"])

    def handed_on(self, step, batch):
        return batch.versions, ""


def ahead_of(engine: Engine, tmp_path, *words: str) -> AheadRollouts:
    given = {text.partition("=")[0]: text for text in (*WORDS, f"run={tmp_path}/run", "steps=9", *words)}
    config, _ = load(TrainConfig, overrides=[*given.values()])
    return AheadRollouts(config, engine, Deadline(10))  # type: ignore[arg-type]


def taken(ahead: AheadRollouts, steps, updated=lambda step: True) -> list[list[int]]:
    """Versions in the batch of each step, each of which makes an update or none."""
    found = []
    for step in steps:
        found.append([*ahead.rollouts(step)[0]])
        ahead.pause()
        ahead.resume(step if updated(step) else None)
    return found  # type: ignore[return-value]


INFLIGHT = "grpo.mode=inflight"


def test_a_batch_of_async_is_of_the_version_that_the_bound_allows_and_the_first_ones_of_the_start(tmp_path):
    engine = Engine()
    found = taken(ahead_of(engine, tmp_path, "grpo.max_staleness=4"), range(1, 10))
    assert found == [[max(step - 5, 0)] for step in range(1, 10)]
    assert engine.done == [*range(1, 10)]


def test_requests_in_flight_go_on_over_as_many_updates_as_the_bound_allows(tmp_path):
    engine = Engine()
    found = taken(ahead_of(engine, tmp_path, "grpo.max_staleness=3", INFLIGHT), range(1, 10))
    assert found == [[*range(max(step - 4, 0), step)] for step in range(1, 10)]
    assert engine.begun == [(2, False), (3, False), (4, True), *((step, True) for step in range(5, 10))]
    assert engine.done == [*range(1, 10)]


def test_a_step_without_an_update_gives_requests_in_flight_no_version(tmp_path):
    found = taken(ahead_of(Engine(), tmp_path, "grpo.max_staleness=2", INFLIGHT), range(1, 6), lambda step: step != 2)
    assert found == [[0], [0, 1], [0, 1], [1, 3], [2, 3, 4]]


@pytest.mark.parametrize("words", [(), (INFLIGHT,)], ids=["async", "inflight"])
@pytest.mark.parametrize("staleness", [1, 2, 4])
def test_a_resumed_run_takes_the_batches_of_its_checkpoint_and_no_batch_twice(tmp_path, words, staleness):
    """The run without a stop had its checkpoint too, for which the engine samples what is in flight to its end."""
    given = (f"grpo.max_staleness={staleness}", *words)
    whole = Engine()
    ahead = ahead_of(whole, tmp_path, *given)
    before = taken(ahead, range(1, 5))
    saved = ahead.saved()
    assert not ahead.runs
    after = taken(ahead, range(5, 10))
    second = Engine()
    resumed = ahead_of(second, tmp_path, *given)
    resumed.restore(5, saved)
    assert taken(resumed, range(5, 10)) == after
    assert len(saved) == staleness
    assert second.done == [*range(5 + staleness, 10)]
    assert whole.done == [*range(1, 10)]
    assert all(step - 1 - min(own) <= staleness for step, own in enumerate([*before, *after], 1))


def test_a_batch_of_another_step_is_trained_by_none(tmp_path):
    ahead = ahead_of(Engine(), tmp_path, "grpo.max_staleness=2")
    ahead.restore(5, [[{"versions": [3]}]])
    with pytest.raises(InternalError, match="the rollouts of step 6 have not been sampled to their end"):
        ahead.rollouts(6)
