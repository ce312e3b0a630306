"""Stored noise floors: measured once, and used for that checkpoint, bit for bit, and nothing else."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.meta.sources import ROOT
from verifier.core.record import Record
from verifier.errors import UsageError
from verifier.model.checkpoint import Checkpoint, open_checkpoint
from verifier.model.tiny import TINY, write_tiny
from verifier.oracle import noise_floor as floors
from verifier.oracle.noise_floor import (
    Floor,
    bucket_of,
    floor_path,
    read_floor,
    record_floor,
    stored_floor,
    write_floor,
)
from verifier.runs.noise import drawn, measure, table

STORED = sorted((ROOT / "golden" / "noise").glob("*.json"))


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return open_checkpoint(write_tiny("qwen3", tmp_path / "models", "bfloat16"))


def off_by_a_hundredth(path: Path, sequences: Sequence[Sequence[int]], dtype: str) -> list[list[float]]:
    gap = 0.01 if dtype == "bfloat16" else 0.0
    return [[-6.0 + gap * (at % 2) for at in range(len(tokens) - 1)] for tokens in sequences]


def measured(checkpoint: Checkpoint) -> Floor:
    return measure(
        "tiny:qwen3", checkpoint, "cpu", off_by_a_hundredth, lambda text: None, why="a test", tokens=2_000
    )  # fmt: skip


def test_statistics_of_a_bucket() -> None:
    gaps = [at / 1000 for at in range(1000)]
    found = bucket_of(64, [gaps[:500], gaps[500:]], [[0.0] * 500] * 2)
    assert (found.tokens, found.median, found.p90, found.p99, found.max) == (1000, 0.5, 0.9, 0.99, 0.999)
    assert found.mean == pytest.approx(0.4995)
    with pytest.raises(UsageError, match="not finite"):
        bucket_of(64, [[-1.0, float("nan")]], [[-1.0, -2.0]])


def test_sequences_are_the_same_on_every_machine_and_fill_the_bucket() -> None:
    found = drawn(65, 256, 512, 3_000)
    assert found == drawn(65, 256, 512, 3_000)
    assert min(map(len, found)) >= 65
    assert max(map(len, found)) <= 256
    assert sum(len(tokens) - 1 for tokens in found) >= 3_000


def test_a_floor_is_used_for_what_it_was_measured_on(
    checkpoint: Checkpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = measured(checkpoint)
    assert [bucket.longest for bucket in found.buckets] == [64, 256, 1024]
    assert stored_floor("tiny:qwen3", checkpoint, "bfloat16", "cpu") is None
    assert write_floor(found) == floor_path("tiny:qwen3", "bfloat16", "cpu")
    assert stored_floor("tiny:qwen3", checkpoint, "bfloat16", "cpu") == found
    assert stored_floor("tiny:qwen3", checkpoint, "bfloat16", "cuda") is None
    other_weights = open_checkpoint(write_tiny("qwen3", tmp_path / "models", "bfloat16", seed=2))
    assert stored_floor("tiny:qwen3", other_weights, "bfloat16", "cpu") is None
    monkeypatch.setattr(floors, "versions", lambda: {"torch": "9", "transformers": "9"})
    assert stored_floor("tiny:qwen3", checkpoint, "bfloat16", "cpu") is None


def test_a_floor_goes_on_record_bucket_by_bucket(checkpoint: Checkpoint) -> None:
    class Kept(list):
        def emit(self, record: Record, array: object = None) -> None:
            self.append(record)

    kept = Kept()
    record_floor(kept, measured(checkpoint))
    assert [item.longest for item in kept] == [64, 256, 1024]
    assert {item.stored for item in kept} == {"golden/noise/tiny-qwen3.bfloat16.cpu.json"}


def test_table_has_a_line_per_bucket(checkpoint: Checkpoint) -> None:
    lines = table(measured(checkpoint)).splitlines()
    assert lines[0] == "noise of tiny:qwen3 in bfloat16 on the cpu tier, nats"
    assert [line.split()[:3] for line in lines[2:]] == [["8", "to", "64"], ["65", "to", "256"], ["257", "to", "1024"]]


@pytest.mark.parametrize("text", ["[", "[]", "{}", '{"buckets": [{}]}'])
def test_what_is_no_floor_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "floor.json"
    file.write_text(text)
    with pytest.raises(UsageError, match="is not a noise floor that `verifier noise --record` wrote"):
        read_floor(file)


@pytest.mark.parametrize("path", STORED, ids=lambda path: path.name)
def test_stored_floors_are_of_the_generated_checkpoints(path: Path, tmp_path: Path) -> None:
    found = read_floor(path)
    assert found.why
    assert path.name == floor_path(found.model, found.dtype, found.tier).name
    if found.model.startswith("tiny:"):
        generated = open_checkpoint(write_tiny(found.model.removeprefix("tiny:"), tmp_path, found.dtype))
        digests = floors.config_digest(generated.config), floors.weights_digest(generated)
        assert (found.config, found.weights) == digests


def test_every_generated_model_has_a_floor_on_the_cpu_tier() -> None:
    held = {json.loads(path.read_text())["model"] for path in STORED if path.name.endswith(".cpu.json")}
    assert held == {f"tiny:{name}" for name in TINY}
