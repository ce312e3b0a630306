"""Whatever shares or copies a weight in an engine equals the new weights after a sync, or is named: tied and untied.

Every family with a row that the engine computes, and derived ones as their config says.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.dist.engine_case import Case, slices_that_differ, write_perturbed
from verifier.engine.api import EngineConfig
from verifier.engine.process import EngineProcess, engine_fork_server
from verifier.model.tiny import TINY, write_tiny
from verifier.platform.upstream_fixes import FIXES, SEPARATE_HEADS, VLLM_HEADS

pytestmark = pytest.mark.slow

START_S = 600
ROWS = {"vllm": ("llama", "qwen2", "qwen3", "qwen3-moe"), "hf": ("llama", "qwen2", "qwen3", "qwen3-moe", "deepseek-v3")}
DERIVED = {"vllm": ("gemma", "gemma3", "mistral", "olmoe"), "hf": ("gemma", "gemma3", "mistral", "olmoe")}
CASES = [(kind, family, tied) for kind, families in ROWS.items() for family in families for tied in (True, False)]
CASES += [(kind, family, None) for kind, families in DERIVED.items() for family in families]


def stale_after_a_sync(kind: str, checkpoint: Path, version: Path, fixes: tuple[str, ...] = ()) -> list[str]:
    """Names of what is not the new weight in an engine whose every tensor was NaN before the sync."""
    with engine_fork_server() as fork_server:
        config = EngineConfig(kind=kind, checkpoint=str(checkpoint), fixes=fixes)
        process = EngineProcess(config, fork_server=fork_server)
        try:
            engine = process.client(START_S)
            engine.wait_ready(START_S)
            assert slices_that_differ(engine, checkpoint) == []
            case = Case.open(engine, 1)
            engine.poison()
            case.sync(version)
            found = slices_that_differ(engine, version)
            case.group.close()
        finally:
            process.stop()
    return found


@pytest.mark.parametrize(
    ("kind", "family", "tied"),
    [
        pytest.param(
            *case, id="-".join(map(str, case)), marks=() if case == ("vllm", "llama", True) else pytest.mark.slow
        )
        for case in CASES
    ],
)
def test_what_shares_or_copies_a_weight_is_new_or_named(tmp_path, kind, family, tied):
    changes = {"tie_word_embeddings": tied} if family in TINY else None
    checkpoint = write_tiny(family, tmp_path / "tiny", changes=changes)
    version = write_perturbed(checkpoint, tmp_path / "version", 1)
    config = json.loads((checkpoint / "config.json").read_text())
    has_head = "lm_head.weight" in (json.loads((checkpoint / "model.safetensors.index.json").read_text())["weight_map"])
    reached = kind == "vllm" and not has_head and config["model_type"] in SEPARATE_HEADS
    found = stale_after_a_sync(kind, checkpoint, version)
    assert [name for name in found if "lm_head.cpu_linear" in name] == found
    assert bool(found) is reached
    if reached:
        assert stale_after_a_sync(kind, checkpoint, version, (VLLM_HEADS,)) == []


def test_the_bug_reaches_tied_heads_of_their_own_alone():
    assert {"llama", "gemma3_text"} <= SEPARATE_HEADS
    assert not {"qwen2", "qwen3", "gemma"} & SEPARATE_HEADS
    assert FIXES[VLLM_HEADS].tiers == ("cpu",)
