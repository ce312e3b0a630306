from __future__ import annotations

import json
import math

import pytest

from verifier.errors import UsageError
from verifier.model.families import (
    FAMILIES,
    family_of,
    layer_scopes,
    num_experts_of,
    predicts_further,
    served,
    sizes_of,
    tensors_of,
)
from verifier.model.tiny import KNOWN, TINY


def _config(name: str) -> dict:
    family, sizes = KNOWN[name]
    return {"architectures": [FAMILIES[family].architecture], **sizes}


@pytest.mark.parametrize("name", TINY)
def test_each_tiny_config_has_its_row(name: str) -> None:
    assert family_of(_config(name)).name == TINY[name][0]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("qwen3", {"attention_bias": True}),
        ("llama", {"mlp_bias": True}),
        ("llama", {"quantization_config": {"quant_method": "fp8"}}),
        ("qwen3-moe", {"mlp_only_layers": [0]}),
        ("qwen3-moe", {"decoder_sparse_step": 2}),
        ("deepseek-v3", {"q_lora_rank": None}),
        ("deepseek-v3", {"num_nextn_predict_layers": 2}),
        ("nemotron-h", {"moe_latent_size": 64}),
        ("nemotron-h", {"hybrid_override_pattern": None}),
        ("qwen3", {"architectures": ["Qwen3ForSequenceClassification"]}),
        ("qwen3", {"architectures": []}),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_a_config_that_the_row_does_not_describe_has_no_row(name: str, change: dict) -> None:
    assert family_of({**_config(name), **change}) is None


@pytest.mark.parametrize("name", KNOWN)
def test_no_matrix_is_square_even_when_cut_in_powers_of_two(name: str) -> None:
    """But of a Qwen2 those that are square by definition."""
    square = ("q_proj.weight", "o_proj.weight") if name == "qwen2" else ()
    for spec in tensors_of(FAMILIES[KNOWN[name][0]], _config(name)):
        if len(spec.shape) == 2 and not spec.name.endswith(square):
            rows, columns = spec.shape
            assert rows != columns, spec
            for parts in (2, 4, 8):
                assert rows // parts != columns, spec
                assert rows != columns // parts, spec


@pytest.mark.parametrize(
    ("name", "num_tensors", "num_values"),
    [
        ("qwen3", 47, 541_792),
        ("qwen3-tied", 46, 492_640),
        ("qwen2", 51, 2_561_920),
        ("llama", 39, 541_536),
        ("qwen3-moe", 231, 1_580_128),
        ("deepseek-v3", 201, 1_511_248),
        ("deepseek-v3-yarn", 201, 1_511_248),
        ("nemotron-h", 111, 845_536),
    ],
)
def test_tensor_table_of_each_tiny_model(name: str, num_tensors: int, num_values: int) -> None:
    specs = list(tensors_of(FAMILIES[TINY[name][0]], _config(name)))
    assert len({spec.name for spec in specs}) == len(specs) == num_tensors
    assert sum(math.prod(spec.shape) for spec in specs) == num_values


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ({"hybrid_override_pattern": "ME*"}, "`hybrid_override_pattern` = 'ME*'"),
        ({"hybrid_override_pattern": "ME*-M-EX"}, "`hybrid_override_pattern` = 'ME*-M-EX'"),
    ],
)
def test_a_pattern_that_is_no_list_of_the_layers_is_refused(change: dict, shown: str) -> None:
    with pytest.raises(UsageError) as caught:
        layer_scopes({**_config("nemotron-h"), **change})
    assert str(caught.value) == f"config.json has {shown} where 8 letters of M*-E are needed"


def test_a_hybrid_without_expert_layers_has_no_experts() -> None:
    assert num_experts_of(_config("nemotron-h")) == 16
    assert num_experts_of({**_config("nemotron-h"), "hybrid_override_pattern": "M*-M*-M-"}) == 0


def test_experts_are_counted_however_the_config_spells_them() -> None:
    """transformers 5 writes a Qwen3-MoE's `num_experts` as `num_local_experts`."""
    _, config = TINY["qwen3-moe"]
    spelled = {"num_local_experts" if key == "num_experts" else key: value for key, value in config.items()}
    assert sizes_of(spelled) == sizes_of(config)


def test_llama_without_head_dim_derives_it() -> None:
    config = _config("llama")
    del config["head_dim"]
    assert sizes_of(config)["head_dim"] == 12


@pytest.mark.parametrize("value", [None, "96", 0, True, 1.5])
def test_a_size_that_is_no_positive_integer_is_refused(value: object) -> None:
    with pytest.raises(UsageError) as caught:
        sizes_of({**_config("qwen3"), "hidden_size": value})
    shown = json.dumps(value).replace("null", "None").replace("true", "True").replace('"', "'")
    assert str(caught.value) == f"config.json has `hidden_size` = {shown} where a positive integer is needed"


@pytest.mark.parametrize(
    ("name", "config", "expected"),
    [
        ("model.layers.1.eh_proj.weight", {"num_nextn_predict_layers": 1}, False),
        ("model.layers.2.eh_proj.weight", {"num_nextn_predict_layers": 1}, True),
        ("model.layers.3.eh_proj.weight", {"num_nextn_predict_layers": 1}, False),
        ("model.layers.2.eh_proj.weight", {"num_nextn_predict_layers": 0}, False),
        ("model.layers.2.eh_proj.weight", {}, False),
        ("mtp.fc.weight", {}, True),
    ],
)
def test_an_engine_serves_all_but_the_layers_for_further_tokens(name: str, config: dict, expected: bool) -> None:
    config = {"num_hidden_layers": 2, **config}
    assert predicts_further(name, config) is expected
    assert served({name: 1}, config) == ({} if expected else {name: 1})
