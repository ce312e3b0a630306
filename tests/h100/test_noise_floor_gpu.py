"""Noise floors of the GPU tier: transformers in bf16 on the GPU against fp32 on the host, written beside the results.

What this does not exercise: trainer and engine against the floor (test_roundtrip.py, where a floor is stored).
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.h100.conftest import RESULTS
from tests.h100.models import model
from verifier.model.checkpoint import open_checkpoint
from verifier.model.named import resolve_model
from verifier.model.tiny import TINY
from verifier.oracle import noise_floor as floors
from verifier.oracle.oracle import Oracle
from verifier.runs.model_under_test import cache_folder
from verifier.runs.noise import DTYPE, measure, table

pytestmark = pytest.mark.h100(gpus=1)

SLOW = "nemotron-h"
"""Its state-space layers go by transformers' own operations, which take 52 GiB."""
APART = (pytest.mark.h100(gpus=1, gib=55.0), pytest.mark.own_process)
ALIKE = 2.0
"""Greatest ratio of two floors' medians: one model, one dtype, two machines' orders of summation."""


@pytest.fixture(scope="module")
def oracle():
    with Oracle(resolve_model(model("qwen3"), cache_folder(), DTYPE), deadline_s=600.0) as found:
        yield found


@pytest.mark.parametrize("name", [pytest.param(name, marks=APART if name == SLOW else ()) for name in sorted(TINY)])
def test_floor_is_like_that_of_the_host(name, oracle, measured, tmp_path, monkeypatch):
    named = model(name)
    checkpoint = open_checkpoint(resolve_model(named, cache_folder(), DTYPE))

    def score(path, sequences, dtype):
        return oracle.score(path, sequences, dtype, "cuda")

    found = measure(named, checkpoint, "cuda", score, print, why="measured by ci/gpu")
    print(table(found))
    stored = [
        item for tier in ("cuda", "cpu") if (item := floors.stored_floor(named, checkpoint, DTYPE, tier)) is not None
    ]
    measured(
        family=name, tokens=[item.tokens for item in found.buckets], longest=[item.longest for item in found.buckets],
        mean=[round(item.mean, 4) for item in found.buckets], median=[round(item.median, 4) for item in found.buckets],
        greatest=[round(item.max, 3) for item in found.buckets], compared_with=[item.tier for item in stored],
    )  # fmt: skip
    results = Path(os.environ[RESULTS]).parent if RESULTS in os.environ else tmp_path
    monkeypatch.setattr(floors, "FLOORS", results / "noise")
    floors.write_floor(replace(found, command="ci/gpu"))
    assert stored, "there is nothing to compare with: record a floor by `verifier noise`"
    for other in stored:
        for ours, theirs in zip(found.buckets, other.buckets, strict=True):
            assert 1 / ALIKE < ours.median / theirs.median < ALIKE, (other.tier, ours, theirs)
