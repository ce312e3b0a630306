"""Checkpoints that are written while training goes on, each once; and what a resume takes from one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.errors import UsageError
from verifier.trainer.checkpoint_folder import Continuation


def test_a_checkpoint_that_is_being_written_is_not_begun_again(tmp_path):
    words = ["model=tiny:add", f"run={tmp_path}", "checkpoint.asynchronous=true", "checkpoint.every=2", "steps=2"]
    config, _ = load(TrainConfig, overrides=words)
    continuation = Continuation(config, SimpleNamespace(path=tmp_path), lambda text: None)  # type: ignore[arg-type]
    calls: list[str] = []

    def call(name: str, **given: Any) -> list[Any]:
        calls.append(name)
        return [[] if given.get("wait", True) else None]  # written once it is waited for

    continuation.begin(call, 2, 2)
    continuation.finish(call, wait=False)
    assert not (tmp_path / "checkpoints" / "2").exists()
    continuation.begin(call, 2, 2)  # at the end of the run
    continuation.finish(call, wait=True)
    assert calls.count("save") == 1
    assert len([*(tmp_path / "checkpoints").iterdir()]) == 1


def test_a_resume_takes_the_step_and_the_batch_that_its_checkpoint_has(tmp_path):
    """Of the newest checkpoint, those of a run that was resumed before included."""
    config, _ = load(TrainConfig, overrides=["model=tiny:add", f"run={tmp_path}", "steps=4"])
    folder = SimpleNamespace(path=tmp_path, rewind=lambda step: {})
    for number, step in enumerate((0, 2, 3)):
        given: list[Any] = []
        ahead: Any = SimpleNamespace(restore=lambda *batch, given=given: given.append(batch))
        continuation = Continuation(config, folder, lambda text: None)  # type: ignore[arg-type]
        assert continuation.rewind()[0] == step
        continuation.restore(ahead)
        assert given == ([(step + 1, [[{"groups": [[f"of {step}"]]}]])] if step else [])
        for later in ((1, 2), (3,), ())[number]:
            continuation.begin(lambda name, **_: [[]], later, later, [[{"groups": [[f"of {later}"]]}]])
            continuation.finish(lambda name, **_: [[]], wait=True)


def test_a_run_none_of_whose_checkpoints_is_whole_is_refused_and_keeps_them(tmp_path):
    config, _ = load(TrainConfig, overrides=["model=tiny:add", f"run={tmp_path}", "steps=4"])
    folder = SimpleNamespace(path=tmp_path, rewind=lambda step: {})
    for step in (1, 2):
        writer = Continuation(config, folder, lambda text: None)  # type: ignore[arg-type]
        writer.rewind()
        writer.begin(lambda name, **_: [[]], step, step)
        writer.finish(lambda name, **_: [[]], wait=True)
    states = [*(tmp_path / "checkpoints").glob("*/state.json")]
    assert len(states) == 2
    said: list[str] = []
    for damaged, state in enumerate(states, 1):
        state.write_bytes(b"{}")
        resumed = Continuation(config, folder, said.append)  # type: ignore[arg-type]
        if damaged < len(states):
            assert resumed._checkpoints.last_whole()[0] is not None
            continue
        with pytest.raises(
            UsageError, match=r"no checkpoint of `.*` is whole .* move `.*checkpoints` away to begin anew"
        ):
            resumed.rewind()
    assert len([*(tmp_path / "checkpoints").glob("*/state.json")]) == 2
    assert len(said) == 2
    assert (tmp_path / "resumes.log").read_text().splitlines()[-2:] == said
