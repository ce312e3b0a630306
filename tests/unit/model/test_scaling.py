"""Rules that make a config tiny: every kind of layer stays, ratios stay, and what is trivial no longer is."""

from __future__ import annotations

from typing import Any

import pytest

from verifier.model.scaling import scaled

PLAIN: dict[str, Any] = {
    "vocab_size": 100_000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
    "bos_token_id": 99_998, "eos_token_id": [99_999, 99_997], "pad_token_id": None, "attention_dropout": 0.1,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}, "sliding_window": 4096,
}  # fmt: skip


def test_sizes_ids_and_dropouts() -> None:
    assert scaled(PLAIN) == {
        "vocab_size": 512, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 4,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
        "bos_token_id": 2, "eos_token_id": 1, "attention_dropout": 0.0, "sliding_window": 64,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("heads", "groups", "tiny"),
    [(32, 8, (8, 2)), (32, 32, (8, 8)), (8, 4, (8, 4)), (16, 2, (16, 2)), (64, 4, (32, 2)), (20, 4, (10, 2)),
     (16, 1, (16, 1)), (48, None, (8, 8))],
)  # fmt: skip
def test_queries_per_key_value_head_stay(heads: int, groups: int | None, tiny: tuple[int, int]) -> None:
    found = scaled({**PLAIN, "num_attention_heads": heads, "num_key_value_heads": groups})
    assert (found["num_attention_heads"], found["num_key_value_heads"]) == tiny


def test_without_a_size_of_a_head_the_hidden_size_is_a_multiple_of_the_heads() -> None:
    found = scaled({key: value for key, value in PLAIN.items() if key != "head_dim"})
    assert (found["hidden_size"], found["num_attention_heads"], "head_dim" in found) == (256, 8, False)


@pytest.mark.parametrize(("period", "kept"), [(2, 4), (4, 4), (6, 6)])
def test_every_kind_of_layer_stays(period: int, kept: int) -> None:
    kinds = ["full" if layer % period == period - 1 else "sliding" for layer in range(32)]
    dense = ["dense", *["sparse"] * 31]
    found = scaled({**PLAIN, "layer_types": kinds, "mlp_layer_types": dense})
    assert found["num_hidden_layers"] == kept
    assert found["layer_types"] == kinds[:kept]
    assert found["mlp_layer_types"] == dense[:kept]


def test_one_dense_layer_stays_before_the_experts() -> None:
    assert scaled({**PLAIN, "first_k_dense_replace": 3})["first_k_dense_replace"] == 1
    assert scaled({**PLAIN, "first_k_dense_replace": 0})["first_k_dense_replace"] == 0


def test_fewer_experts_are_chosen_than_there_are_and_groups_divide_them() -> None:
    found = scaled({**PLAIN, "n_routed_experts": 256, "num_experts_per_tok": 8, "n_group": 8, "topk_group": 4})
    assert [found[key] for key in ("n_routed_experts", "num_experts_per_tok", "n_group", "topk_group")] == [16, 4, 4, 2]
    assert scaled({**PLAIN, "num_experts": 64, "num_experts_per_tok": None})["num_experts_per_tok"] == 4
    assert "num_experts_per_tok" not in scaled({**PLAIN, "num_experts": None, "num_experts_per_tok": 2})


def test_scaled_rope_begins_within_the_positions() -> None:
    yarn = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}
    found = scaled({**PLAIN, "rope_parameters": yarn})
    assert found["rope_parameters"] == {**yarn, "original_max_position_embeddings": 64}
    assert found["max_position_embeddings"] == 64 * 32


def test_sections_of_a_rope_add_up_to_its_pairs() -> None:
    rope = {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [11, 11, 10]}
    found: Any = scaled({**PLAIN, "rope_parameters": rope})["rope_parameters"]
    assert sum(found["mrope_section"]) == 8


def test_multipliers_of_one_differ_from_one_and_from_each_other() -> None:
    found = scaled({**PLAIN, "key_multiplier": 1.0, "mlp_multipliers": [1.0, 1.0], "lm_head_multiplier": 0.5})
    assert found["key_multiplier"] not in (1.0, None)
    assert "lm_head_multiplier" not in found
    first, second = found["mlp_multipliers"]  # type: ignore[misc]
    assert len({1.0, first, second}) == 3


def test_a_factor_of_experts_is_not_one() -> None:
    assert scaled({**PLAIN, "routed_scaling_factor": 1.0})["routed_scaling_factor"] not in (1.0, None)
    assert "routed_scaling_factor" not in scaled({**PLAIN, "routed_scaling_factor": 2.5})
