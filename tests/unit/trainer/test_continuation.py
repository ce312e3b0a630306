"""Checkpoints that are written while training goes on, each once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.trainer.continuation import Continuation


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
