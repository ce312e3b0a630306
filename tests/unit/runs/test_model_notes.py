"""What is said of a model before its ranks start. What is found of it runs in tests/contracts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from verifier.errors import InternalError, UsageError, VerifierError
from verifier.mesh import Mesh
from verifier.runs.model_notes import notes_of
from verifier.runs.model_under_test import ModelUnderTest, open_model
from verifier.runs.resources import Deadline

UNMAPPED = "megatron-bridge has no mapping of 1 of 2 checkpoint tensors, so no export can hold them: `lm_head.weight`"


class _Ranks:
    """In a launcher's place: a rank that answers, or fails."""

    def __init__(self, answer: Mapping[str, Any] | VerifierError) -> None:
        self._answer = answer

    def run(self, function: str, **options: Any) -> list[Any]:
        if isinstance(self._answer, VerifierError):
            raise self._answer
        return [self._answer]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModelUnderTest:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return open_model("tiny:qwen3", "float32", Mesh())


def test_a_model_that_both_libraries_read_alike_has_no_note(model):
    assert notes_of(model, _Ranks({"notes": [], "headless": False}), Deadline(60)) == ()


def test_a_row_that_is_missed_comes_first(model):
    config = {**model.checkpoint.config, "attention_bias": True}
    model = replace(model, checkpoint=replace(model.checkpoint, config=config))
    first, second = notes_of(model, _Ranks({"notes": [UNMAPPED], "headless": False}), Deadline(60))
    assert first.startswith("the hand-written row qwen3 does not hold for this model")
    assert second == UNMAPPED


def test_an_output_layer_without_a_mapping_is_refused(model):
    with pytest.raises(UsageError) as refusal:
        notes_of(model, _Ranks({"notes": [UNMAPPED], "headless": True}), Deadline(60))
    end = "; the trainer's output layer has none either, and the load would end in an AttributeError"
    assert str(refusal.value) == UNMAPPED + end


def test_a_bridge_that_fails_on_the_config_is_a_note(model):
    ranks = _Ranks(InternalError("rank 0 failed: AttributeError: no `first_k_dense_replace`\ntraceback"))
    reason = "rank 0 failed: AttributeError: no `first_k_dense_replace`"
    text = f"what megatron-bridge makes of config.json was not looked at: {reason}"
    assert notes_of(model, ranks, Deadline(60)) == (text,)
