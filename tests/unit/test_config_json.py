"""Every spelling of a rope, a dtype and a quantization has the meaning that transformers gives it."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import Gemma3TextConfig, Glm4Config, LlamaConfig, Qwen3NextConfig

from verifier.config_json import (
    contradiction,
    epsilon,
    further_pattern,
    head_dim,
    hybrid_pattern,
    quantization,
    rope,
    ropes,
    rotary_dim,
    stated_dtype,
    with_defaults,
)

KEPT = ("rope_type", "rope_theta", "partial_rotary_factor", "factor", "original_max_position_embeddings")


@st.composite
def spelled_ropes(draw):
    """A rope's part of config.json, in the old form or the new one, and its numbers beside the table or in it."""
    numbers = {"rope_theta": draw(st.sampled_from([1e4, 5e5, None]))}
    numbers["partial_rotary_factor"] = draw(st.sampled_from([0.25, 0.5, None]))
    table = {}
    if draw(st.booleans()):
        table = {draw(st.sampled_from(["type", "rope_type"])): "linear", "factor": 4.0}
    found = {}
    for key, value in numbers.items():
        if value is not None:
            (table if draw(st.booleans()) else found)[key] = value
    key = draw(st.sampled_from(["rope_scaling", "rope_parameters"]))
    return {**found, **({key: table} if table else draw(st.sampled_from([{}, {key: None}])))}


@pytest.mark.parametrize("kind", [LlamaConfig, Glm4Config, Qwen3NextConfig])
@given(spelled_ropes())
def test_a_rope_is_that_of_transformers(kind, stated):
    read = kind(**copy.deepcopy(stated)).to_dict()
    values = with_defaults({"head_dim": 64, **stated}, {"head_dim": 64, **read})
    want = {key: value for key, value in read["rope_parameters"].items() if key in KEPT}
    assert {key: value for key, value in rope(values).items() if key in KEPT} == want
    assert rotary_dim(values) == int(64 * want.get("partial_rotary_factor", 1))
    assert contradiction(stated) == ""


def test_a_rope_that_is_stated_for_some_layers_alone_is_one_of_several():
    stated = {"sliding_window": 1024, "rope_scaling": {"factor": 8.0, "rope_type": "linear"}}  # Gemma 3 4B
    values = with_defaults(stated, Gemma3TextConfig(**copy.deepcopy(stated)).to_dict())
    assert [item["rope_type"] for item in ropes(values)] == ["default", "linear"]
    assert rope(values) == {}


@pytest.mark.parametrize(
    ("stated", "width"),
    [
        ({"rotary_dim": 32}, 32),
        ({"rotary_dim": None}, 64),
        ({"rotary_pct": 0.25}, 16),
        ({"rotary_emb_fraction": 0.5}, 32),
        ({"partial_rotary_factor": 0.5}, 32),
        ({"text_config": {"rope_parameters": {"partial_rotary_factor": 0.25}}}, 16),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 4}, 4),
    ],
)
def test_the_rotated_width(stated, width):
    assert rotary_dim({"head_dim": 64, "rope_theta": 1e4, **stated}) == width


def test_the_width_of_a_head_has_two_spellings_and_a_default():
    sizes = {"hidden_size": 96, "num_attention_heads": 4}
    assert [head_dim(sizes | stated) for stated in ({"head_dim": 32}, {"attention_head_dim": 32}, {})] == [32, 32, 24]


@pytest.mark.parametrize(
    ("stated", "places"),
    [
        ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e4}}, ("`rope_theta`", "`rope_parameters.rope_theta`")),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_theta": 5e4}}, ("`rope_theta`", "`rope_scaling.rope_theta`")),
        ({"partial_rotary_factor": 0.5, "head_dim": 64, "rotary_dim": 16}, ("`rotary_dim / head_dim` = 0.25",)),
        ({"rope_scaling": {"factor": 2.0}, "rope_parameters": {"factor": 4.0}}, ("2.0", "4.0")),
        ({"text_config": {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 5e4}}}, ("10000.0", "50000.0")),
    ],
)
def test_a_number_that_is_stated_twice_and_differently_is_named(stated, places):
    assert all(place in contradiction(stated) for place in places)


@pytest.mark.parametrize(
    "stated",
    [
        {"rope_theta": 10000, "rope_parameters": {"rope_theta": 1e4}},
        {"rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [2, 3, 3]}},
        {"rope_theta": 1e4, "rope_parameters": {"full": {"rope_theta": 1e6}, "sliding": {"rope_theta": 1e4}}},
        {"partial_rotary_factor": 0.5, "head_dim": 64, "rotary_dim": 32},
    ],
)
def test_what_agrees_is_no_contradiction(stated):
    assert contradiction(stated) == ""


def test_a_rope_of_each_kind_of_layer():
    stated = {"rope_theta": 1e4, "rope_parameters": {"full": {"rope_theta": 1e6}, "sliding": {"type": "linear"}}}
    assert [(item["rope_theta"], item["rope_type"]) for item in ropes(stated)] == [(1e6, "default"), (1e4, "linear")]
    assert rope(stated) == {}


@pytest.mark.parametrize(
    ("stated", "value"),
    [
        ({"rms_norm_eps": 1e-6}, 1e-6),
        ({"layer_norm_epsilon": 1e-5, "norm_eps": 1e-5}, 1e-5),
        ({"layer_norm_epsilon": 1e-5, "norm_eps": 1e-6}, ...),
        ({}, ...),
    ],
)
def test_an_epsilon(stated, value):
    assert epsilon(stated) == value


@pytest.mark.parametrize(
    ("stated", "dtype", "method"),
    [
        ({"torch_dtype": "bfloat16"}, "bfloat16", None),
        ({"dtype": "torch.float16", "torch_dtype": "float32"}, "float16", None),
        ({"dtype": "auto", "text_config": {"dtype": "bfloat16"}}, "bfloat16", None),
        ({"quantization_config": {"quant_method": "mxfp4"}}, None, "mxfp4"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, None, "fp8"),
        ({"compression_config": {"quant_method": "compressed-tensors"}}, None, "compressed-tensors"),
        ({"quantization_config": None}, None, None),
        ({"quantization_config": {"quant_algo": "FP8", "producer": {"name": "modelopt"}}}, None, "FP8"),
        ({"quantization_config": {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}}, None, "NVFP4"),
        ({"quantization_config": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}}, None, "bitsandbytes"),
        ({"quantization_config": {"bits": 4}}, None, "a method without a name"),
    ],
)
def test_dtype_and_quantization(stated, dtype, method):
    assert (stated_dtype(stated), quantization(stated)) == (dtype, method)


def test_a_pattern_of_kinds_is_that_of_letters():
    assert hybrid_pattern({"layers_block_type": ["mamba", "moe", "attention", "mlp"]}) == "ME*-"
    assert hybrid_pattern({"layers_block_type": ["attention", "linear"]}) is None
    assert hybrid_pattern({"hybrid_override_pattern": "M*"}) == "M*"
    assert further_pattern({"mtp_layers_block_type": ["attention", "moe", "moe"]}) == "*EE"
    assert further_pattern({"mtp_hybrid_override_pattern": "M"}) == "M"
    assert further_pattern({}) == "*E", "the default of transformers"
