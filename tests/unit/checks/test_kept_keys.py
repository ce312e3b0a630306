"""Keys that engines have right after a sync, by ENG010.

What this does not exercise: vLLM's own account of its cache (faults of verifier/stages/rollout/faults_training.py).
"""

from __future__ import annotations

import pytest

from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.stages.engine.checks import keys_outlive_their_weights
from verifier.stages.engine.records import KeptKeys


def wrong(blocks: tuple[int, ...], tokens: tuple[int, ...], *, kept: bool = False) -> list[str]:
    record = KeptKeys(name="keys after a sync", version=2, blocks=blocks, tokens=tokens, kept=kept)
    trace = Trace(Manifest(), [record], {}.__getitem__)
    return [item.what for item in keys_outlive_their_weights(trace) if not item.same]


def test_an_empty_cache_holds():
    assert wrong((0, 0), (0, 0)) == []


@pytest.mark.parametrize(("blocks", "tokens"), [((0, 3), (0, 0)), ((0, 0), (0, 7))])
def test_keys_for_new_prompts_and_for_running_requests_are_named_with_their_engine(blocks, tokens):
    assert wrong(blocks, tokens) == ["engine 1"]


def test_requests_that_were_to_keep_their_keys_may():
    assert wrong((3, 0), (7, 0), kept=True) == []
