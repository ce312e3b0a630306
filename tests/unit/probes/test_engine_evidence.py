"""Evidence of what an engine holds after a sync, and as the next begins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verifier.engine.api import EngineTensor
from verifier.stages.engine.probe_engine_state import HeldEngine
from verifier.stages.engine.records import ColdSettings, ColdTensor, EngineServed, SyncedSettings, SyncedTensor


class _Engine:
    """An engine of one rank with a parameter and a buffer."""

    def __init__(self) -> None:
        self.weight, self.table = "1", "2"

    def state(self) -> list[list[EngineTensor]]:
        rows = (("w", "parameter", self.weight), ("table", "buffer", self.table))
        return [
            [EngineTensor(name=n, kind=kind, dtype="float32", shape=(2,), digest=_digest(d)) for n, kind, d in rows]
        ]

    def call(self, function: str) -> list[list[tuple[str, dict[str, str]]]]:
        return [[("norm", {"eps": "1e-06"})]]


def _digest(bits: str) -> str:
    return "vd1:" + bits * 32


def _probe() -> tuple[Any, list[Any]]:
    seen: list[Any] = []
    return SimpleNamespace(emit=seen.append), seen


def test_what_changes_between_two_syncs_is_recorded() -> None:
    engine: Any = _Engine()
    held = HeldEngine(engine, sleeps=False)
    probe, seen = _probe()
    held.record_served([probe], 0)  # nothing was sent yet
    engine.weight = "3"
    held.synced(1)
    held.record_served([probe], 1)
    engine.weight = "1"
    held.record_served([probe], 1)
    assert [(item.version, item.num_tensors, len(item.changed)) for item in seen] == [(0, 2, 0), (1, 2, 0), (1, 2, 1)]
    assert seen[-1].changed == ("w",)
    assert all(isinstance(item, EngineServed) for item in seen)


def test_a_sync_is_recorded_beside_the_start() -> None:
    engine: Any = _Engine()
    held = HeldEngine(engine, sleeps=False)
    engine.weight, engine.table = "3", "4"
    probe, seen = _probe()
    held.synced(1, [probe])
    tensors = [
        (type(item), item.name, item.digest[-1]) for item in seen if isinstance(item, (SyncedTensor, ColdTensor))
    ]
    assert tensors == [(SyncedTensor, "w", "3"), (SyncedTensor, "table", "4"), (ColdTensor, "table", "2")]
    settings = [type(item) for item in seen if isinstance(item, (SyncedSettings, ColdSettings))]
    assert settings == [SyncedSettings, ColdSettings]


def test_an_engine_that_sleeps_is_asked_right_after_a_sync_alone() -> None:
    engine: Any = _Engine()
    asked = []
    read, engine.state = engine.state, lambda: asked.append(engine.weight) or read()
    held = HeldEngine(engine, sleeps=True)
    probe, seen = _probe()
    held.record_served([probe], 0)
    assert not asked
    held.synced(1, [probe])
    held.record_served([probe], 1)
    assert asked == ["1"]
    assert {type(item) for item in seen} == {SyncedTensor, SyncedSettings}
