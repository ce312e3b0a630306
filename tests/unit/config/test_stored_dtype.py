"""A run that is not told a dtype takes the one that config.json names."""

import json

import pytest

from verifier.config import GoldenConfig
from verifier.config.stored_dtype import stored_dtype

KNOWN = ("float32", "bfloat16")


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16", "model_type": "x"}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "float16"}, "float32"),
        ({"dtype": 16}, "float32"),
        ({}, "float32"),
        ([], "float32"),
    ],
)
def test_of_a_folder(tmp_path, config, dtype):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stored_dtype(str(tmp_path), KNOWN) == dtype
    assert GoldenConfig(model=str(tmp_path)).dtype == dtype
    assert GoldenConfig(model=str(tmp_path), dtype="float32").dtype == "float32"


def test_of_a_generated_model_and_of_what_is_no_model():
    assert stored_dtype("tiny:qwen3", KNOWN) == "float32"
    assert stored_dtype("a\0b", KNOWN) == "float32"
