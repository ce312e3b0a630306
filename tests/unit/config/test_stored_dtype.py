"""A run that is not told a dtype takes the one that config.json names."""

import json

import pytest
import torch
from safetensors.torch import save_file

from verifier.config import GoldenConfig
from verifier.config.commands import stored_dtype


@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        ({"dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "bfloat16", "model_type": "x"}, "bfloat16"),
        ({"text_config": {"dtype": "bfloat16"}}, "bfloat16"),
        ({"dtype": "float16"}, "float32"),
        ({"dtype": 16}, "float32"),
        ({"dtype": "bfloat16", "torch_dtype": "float32"}, "bfloat16"),
        ({"torch_dtype": "bfloat16", "time_step_limit": [0.0, float("inf")], "x": float("nan")}, "bfloat16"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "bfloat16"),
        ({}, "float32"),
        ([], "float32"),
    ],
)
def test_of_a_folder(tmp_path, config, dtype):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert stored_dtype(str(tmp_path)) == dtype
    assert GoldenConfig(model=str(tmp_path)).dtype == dtype
    assert GoldenConfig(model=str(tmp_path), dtype="float32").dtype == "float32"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_of_the_weights_where_config_json_names_none(tmp_path, dtype):
    (tmp_path / "config.json").write_text("{}")
    tensors = {name: torch.ones(2, dtype=getattr(torch, dtype)) for name in "ab"}
    save_file(tensors | {"bias": torch.ones(2)}, tmp_path / "model.safetensors")
    assert stored_dtype(str(tmp_path)) == dtype


def test_of_a_generated_model_and_of_what_is_no_model():
    assert stored_dtype("tiny:qwen3") == "float32"
    assert stored_dtype("a\0b") == "float32"
