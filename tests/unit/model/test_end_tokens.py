"""End tokens of a checkpoint: config.json and generation_config.json, one or several each."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from verifier.errors import UsageError
from verifier.model.checkpoint import end_tokens


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({"eos_token_id": 2}, None, {2}),
        ({"eos_token_id": None}, None, set()),
        ({}, {"eos_token_id": [5, 7]}, {5, 7}),
        ({"eos_token_id": 2}, {"eos_token_id": [2, 7]}, {2, 7}),
        ({"text_config": {"eos_token_id": 9}}, None, {9}),
    ],
)
def test_both_files_are_read(config, generation, expected, tmp_path):
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert end_tokens(SimpleNamespace(path=tmp_path, config=config)) == expected


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_generation_config_that_is_no_object_is_refused(text, tmp_path):
    (tmp_path / "generation_config.json").write_text(text)
    with pytest.raises(UsageError, match=r"generation_config\.json (is not valid JSON|holds a JSON list)"):
        end_tokens(SimpleNamespace(path=tmp_path, config={}))
