"""Mismatches read as kinds."""

import pytest

from verifier.report.render_text import grouped, kind_of_name


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("model.layers.3.input_layernorm.weight", "norm weights"),
        ("model.norm.weight", "norm weights"),
        ("model.layers.0.self_attn.q_norm.weight", "norm weights"),
        ("model.layers.0.self_attn.q_proj.bias", "biases"),
        ("model.layers.0.self_attn.q_proj.weight", "attention weights"),
        ("model.layers.7.mlp.experts.12.down_proj.weight", "expert weights"),
        ("model.layers.7.mlp.shared_experts.down_proj.weight", "shared-expert weights"),
        ("model.layers.7.mlp.gate.weight", "router weights"),
        ("model.layers.7.mlp.gate_proj.weight", "MLP weights"),
        ("model.embed_tokens.weight", "embeddings"),
        ("lm_head.weight", "output heads"),
        ("scored sequence 3", "scored sequences"),
        ("next turn sequence 12", "next turn sequences"),
        ("chunk 3", "`chunk *`"),
    ],
)
def test_kind(name, kind):
    assert kind_of_name(name) == kind


def test_largest_first_and_the_rest_counted():
    names = [f"model.layers.{index}.input_layernorm.weight" for index in range(34)]
    assert grouped(names) == "34 of 34 are norm weights"
    names += ["lm_head.weight", "a", "b", "b"]
    assert grouped(names) == "34 of 38 are norm weights, 2 `b`, 1 `a`, 1 others"


def test_kinds_of_one_size_are_named_in_the_order_of_their_names() -> None:
    assert grouped(["y", "x"]) == grouped(["x", "y"]) == "1 of 2 are `x`, 1 `y`"
