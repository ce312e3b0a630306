"""Sequences of 4,096 tokens: beyond the first blocks of caches, windows of 64, and the positions that YaRN stretches.

What this does not exercise: GPUs, whose attention kernels and caches are others; mixtures, whose routers tie.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.clean_case import judge
from verifier.config import EngineOptions, RoundtripConfig
from verifier.core import store
from verifier.mesh import Mesh
from verifier.model.tiny import write_tiny
from verifier.platform.upstream_fixes import VLLM_HEADS
from verifier.runs.runner import Runner, run_once
from verifier.stages.rollout.records import SampledTokens

LENGTH = 4096
YARN = {
    "rope_type": "yarn", "factor": 128.0, "beta_fast": 2.0, "beta_slow": 0.25, "truncate": True,
    "original_max_position_embeddings": 64,
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["qwen3-yarn", "gemma3_text"])
def test_a_round_trip_of_long_sequences_holds_on_cp2(tmp_path: Path, name: str) -> None:
    changes = {"max_position_embeddings": 2 * LENGTH, "rope_scaling": YARN} if name == "qwen3-yarn" else None
    model = write_tiny(name, tmp_path / "model", changes=changes)
    if changes is None:
        config = json.loads((model / "config.json").read_text())
        (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2 * LENGTH}))
    asked = RoundtripConfig(
        model=str(model), trace=tmp_path / "trace", mesh=Mesh(cp=2), cycles=1, length=LENGTH,
        engine=EngineOptions(kind="vllm"), fixes=() if changes else ("bridge-5712", VLLM_HEADS),
    )  # fmt: skip
    trace = run_once(Runner.roundtrip, asked, print)
    judge(trace)
    (whole,) = store.read(trace).of(SampledTokens, name="sampled along the length")
    assert len(whole.tokens[0]) > LENGTH - 64
    (near,) = store.read(trace).of(SampledTokens, name="sampled after a like prompt")
    assert all(32 * (most // 32) >= held for held, most in zip(near.cached, near.common, strict=True))
