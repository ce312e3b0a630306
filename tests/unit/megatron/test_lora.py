"""Adapters outside of Megatron: written for an engine, and refused where they do not fit."""

from __future__ import annotations

import json

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file

from verifier.megatron.lora_megatron import (
    SCALING,
    LoraSpec,
    further_settings,
    held_by_engine,
    read_adapter,
    save_adapter,
)

NAME = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter():
    shapes = {"lora_A": (2, 4), "lora_B": (6, 2)}
    return {f"{NAME}.{name}.weight": torch.randn(shape).bfloat16() for name, shape in shapes.items()}


def test_saved_adapter_is_what_peft_reads(adapter, tmp_path):
    save_adapter(tmp_path / "adapter", adapter, LoraSpec(2, 4))
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["lora_alpha"]) == ("LORA", 2, 4)
    assert config["target_modules"] == ["q_proj"]
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.") for name in stored} == set(adapter)
    assert all(torch.equal(stored[f"base_model.model.{name}"], tensor) for name, tensor in adapter.items())


def test_engine_holds_b_scaled_exactly(adapter):
    held = held_by_engine(adapter, SCALING)
    assert torch.equal(held[f"{NAME}.lora_A.weight"], adapter[f"{NAME}.lora_A.weight"])
    assert torch.equal(held[f"{NAME}.lora_B.weight"] / SCALING, adapter[f"{NAME}.lora_B.weight"])


def test_what_is_read_is_what_was_written_and_how_an_engine_scales_it(adapter, tmp_path):
    save_adapter(tmp_path / "adapter", adapter, LoraSpec(4, 8))
    found, scaling = read_adapter(tmp_path / "adapter")
    assert scaling == SCALING
    assert found.keys() == adapter.keys()
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "use_rslora": True}))
    assert read_adapter(tmp_path / "adapter")[1] == 2 * SCALING  # by the root of the rank, which is 4


def test_matrices_whose_names_lack_the_prefix_are_skipped_as_the_peft_library_skips_them(adapter, tmp_path):
    path = tmp_path / "adapter"
    save_adapter(path, adapter, LoraSpec(4, 8))
    assert read_adapter(path)[0].keys() == adapter.keys()
    save_file(adapter, path / "adapter_model.safetensors")
    assert read_adapter(path)[0].keys() == {f"skipped: {name}" for name in adapter}


def test_configuration_that_the_peft_library_writes_of_a_plain_adapter_asks_for_nothing_further(adapter, tmp_path):
    path = tmp_path / "adapter"
    save_adapter(path, adapter, LoraSpec(4, 8))
    assert further_settings(path) == {}
    peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj"], inference_mode=True).save_pretrained(path)
    assert further_settings(path) == {}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("alpha_pattern", {"q_proj": 4}), ("rank_pattern", {"q_proj": 2}), ("layers_to_transform", [0]),
        ("exclude_modules", ["k_proj"]), ("use_dora", True), ("bias", "lora_only"), ("lora_dropout", 0.1),
        ("modules_to_save", ["lm_head"]), ("peft_type", "ADALORA"), ("fan_in_fan_out", True),
    ],
)  # fmt: skip
def test_what_a_configuration_asks_for_beyond_rank_alpha_and_linears_is_read(key, value, adapter, tmp_path):
    save_adapter(tmp_path / "adapter", adapter, LoraSpec(4, 8))
    file = tmp_path / "adapter" / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), key: value}))
    assert further_settings(tmp_path / "adapter") == {key: json.dumps(value)}
