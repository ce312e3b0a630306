"""Settings of an engine's modules that config.json decides: a linear with gates has twice the heads."""

from __future__ import annotations

import pytest

from verifier.stages.engine.checks import _compared

SIZES = {"num_attention_heads": 16, "num_key_value_heads": 4, "hidden_size": 512}


@pytest.mark.parametrize(
    ("config", "module", "heads"),
    [
        (SIZES, "model.layers.3.self_attn.qkv_proj", 16),
        ({**SIZES, "linear_num_value_heads": 8}, "model.layers.3.self_attn.qkv_proj", 32),
        ({**SIZES, "linear_num_value_heads": 8}, "model.layers.3.self_attn", 16),
        ({**SIZES, "linear_num_value_heads": 8, "attn_output_gate": False}, "model.layers.3.self_attn.qkv_proj", 16),
    ],
)
def test_queries_with_gates_have_twice_the_heads(config: dict[str, object], module: str, heads: int) -> None:
    wanted = [value for attribute, _, value in _compared(config, module) if attribute == "total_num_heads"]
    assert wanted == [heads]
