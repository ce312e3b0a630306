"""What a resume takes from a checkpoint, and what was written of it, beside what came next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core.records_run import WrittenState
from verifier.core.records_trainer import LoadedState, SavedState
from verifier.probes.training.checkpoint_evidence import CheckpointEvidence
from verifier.trainer.checkpoint_folder import RunState
from verifier.trainer.continuation import Continuation


def test_what_ranks_read_back_is_recorded_once_with_the_next_evidence(tmp_path):
    config, _ = load(TrainConfig, overrides=["model=tiny:add", f"run={tmp_path}"])
    evidence = CheckpointEvidence(config)
    continuation = Continuation(config, SimpleNamespace(path=tmp_path), lambda text: None, evidence)  # type: ignore[arg-type]
    tensors = [{"name": "a", "given": [1, 2], "written": [1, 3]}, {"name": "b", "given": [4], "written": []}]
    records: list[Any] = []
    probe: Any = SimpleNamespace(emit=lambda record, arrays=None: records.append((record, arrays)))
    for step in (1, 2):
        continuation.begin(lambda name, **_: [tensors, []], step, step)
        continuation.finish(lambda name, **_: [tensors, []], wait=True)
    assert evidence.record_stored(probe)
    assert not evidence.record_stored(probe)
    assert [(item.name, item.version, item.counts, item.found) for item, _ in records] == [
        ("rank 0", 1, (2, 1), (2, 0)), ("rank 1", 1, (), ()), ("rank 0", 2, (2, 1), (2, 0)), ("rank 1", 2, (), ()),
    ]  # fmt: skip
    assert {name: values.tolist() for name, values in records[2][1].items()} == {"given": [1, 2, 4], "written": [1, 3]}


@pytest.mark.parametrize("kept", [True, False])
def test_the_batch_that_the_first_step_takes_is_compared_with_the_saved_one(tmp_path, kept):
    """Not the one that it was given: that may be thrown away for another."""
    config, _ = load(TrainConfig, overrides=["model=tiny:add", f"run={tmp_path}"])
    evidence = CheckpointEvidence(config)
    continuation = Continuation(config, SimpleNamespace(path=tmp_path), lambda text: None, evidence)  # type: ignore[arg-type]
    rollouts = [{"groups": [["saved"]]}]
    continuation._at = evidence._unjudged = RunState(
        step=2, updates=2, data_position=2, weight_version=2, seed=1, config="", mesh="", rollouts=rollouts
    )
    ahead = SimpleNamespace(restore=lambda step, given: None, taken=None)
    continuation.restore(ahead)  # type: ignore[arg-type]
    evidence.begin(ahead, None)  # type: ignore[arg-type]
    ahead.taken = SimpleNamespace(saved=lambda: rollouts if kept else [{"groups": [["sampled anew"]]}])
    records: list[Any] = []
    assert evidence.record(SimpleNamespace(emit=records.append), 3)  # type: ignore[arg-type]
    saved, loaded = (
        next(item.digest for item in records if isinstance(item, kind) and item.name == "data/rollouts")
        for kind in (SavedState, LoadedState)
    )
    assert (saved == loaded) is kept


@pytest.mark.parametrize(("asked", "missed"), [(4, True), (2, False)])
def test_a_checkpoint_without_the_batch_that_was_sampled_ahead_says_so(tmp_path, asked, missed):
    """After the last step that was asked for nothing is sampled ahead."""
    config, _ = load(TrainConfig, overrides=["model=tiny:add", f"run={tmp_path}", "algorithm=grpo", "grpo.mode=async",
                                             "grpo.ratio_over=engine", "grpo.max_staleness=1"])  # fmt: skip
    evidence = CheckpointEvidence(config)
    continuation = Continuation(config, SimpleNamespace(path=tmp_path), lambda text: None, evidence)  # type: ignore[arg-type]
    continuation._at = evidence._unjudged = RunState(
        step=2, updates=2, data_position=2, weight_version=2, seed=1, config="", mesh="", asked=asked
    )
    records: list[Any] = []
    assert evidence.record(SimpleNamespace(emit=records.append), 3)  # type: ignore[arg-type]
    assert any(item.name == "data/rollouts" for item in records) is missed


@pytest.mark.parametrize("late", [False, True])
def test_what_was_written_is_read_back_beside_the_batch_that_came_next(tmp_path, late):
    """A checkpoint that is written in the background may be whole a step later, when another batch is taken."""
    config, _ = load(TrainConfig, overrides=["model=tiny:add", f"run={tmp_path}"])
    evidence = CheckpointEvidence(config)
    continuation = Continuation(config, SimpleNamespace(path=tmp_path), lambda text: None, evidence)  # type: ignore[arg-type]
    taken: Any = SimpleNamespace(saved=lambda: [{"groups": [["next"]]}])
    ahead: Any = SimpleNamespace(taken=taken, saved=lambda: [{"groups": [["waits"]]}])
    continuation.restore(ahead)
    evidence.begin(ahead, None)
    tensors = [{"name": "a", "given": [1], "written": [1]}]
    records: list[Any] = []
    probe: Any = SimpleNamespace(emit=lambda record, arrays=None: records.append(record))
    continuation.begin(lambda name, **_: [tensors], 1, 1, taken.saved())
    if late:
        evidence.record_stored(probe)
        evidence.record_states(probe)
        ahead.taken = SimpleNamespace(saved=lambda: [{"groups": [["the one after"]]}])
    continuation.finish(lambda name, **_: [tensors], wait=True)
    evidence.record_stored(probe)
    evidence.record_states(probe)
    continuation.begin(lambda name, **_: [tensors], 2, 2, taken.saved())
    continuation.finish(lambda name, **_: [tensors], wait=True)
    evidence.record_stored(probe)
    evidence.record_states(probe, ended=True)
    states = [item for item in records if isinstance(item, WrittenState)]
    assert [(item.version, item.numbers["step"], item.rollouts == item.after) for item in states] == [
        (1, 1, True), (2, 2, False)
    ]  # fmt: skip
