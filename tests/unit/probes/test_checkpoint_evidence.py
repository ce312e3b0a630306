"""What is recorded of checkpoints, with the evidence that comes next."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.stages.checkpoint.probe_written import CheckpointEvidence
from verifier.trainer.checkpoint_folder import Continuation


def test_what_ranks_read_back_is_recorded_once_with_the_next_evidence(tmp_path):
    config, _ = load(TrainConfig, overrides=["model=tiny:add", f"run={tmp_path}"])
    evidence = CheckpointEvidence()
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
