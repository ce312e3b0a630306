"""The oracle's gated delta rule: transformers' own recurrence in float32, its gradients, and who has it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from verifier.model.architectures_hf import write_scaled
from verifier.model.delta_rule_hf import gated_delta_rule
from verifier.model.transformers_hf import load_model


def _inputs(tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key, value, logarithm of the decay and rate of two sequences with three heads."""
    draw = torch.Generator().manual_seed(tokens)
    q, k, v, g, b = (
        torch.randn(2, tokens, 3, *width, generator=draw).to(dtype) for width in ((5,), (5,), (4,), (), ())
    )
    return [q, k, v, -functional.softplus(g), b.sigmoid()]


@pytest.mark.parametrize("tokens", [1, 32, 75])
def test_the_rule_is_the_recurrence_of_transformers_and_hands_its_state_on(tokens: int) -> None:
    whole = _inputs(tokens + 40, torch.float32)
    expected, last = torch_recurrent_gated_delta_rule(*whole, None, True, use_qk_l2norm_in_kernel=True)
    first, state = gated_delta_rule(
        *(item[:, :tokens] for item in whole), output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    then, end = gated_delta_rule(
        *(item[:, tokens:] for item in whole),
        initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    torch.testing.assert_close(torch.cat([first, then], dim=1), expected)
    torch.testing.assert_close(end, last)


def test_gradients_are_those_of_the_rule_over_several_segments() -> None:
    inputs = [item.requires_grad_() for item in _inputs(40, torch.float64)]
    assert torch.autograd.gradcheck(lambda *given: gated_delta_rule(*given)[0], inputs, fast_mode=True)


def test_float64_is_kept_and_bfloat16_is_computed_in_float32() -> None:
    exact = _inputs(75, torch.float64)
    right = gated_delta_rule(*exact)[0]
    assert right.dtype == torch.float64
    assert (torch_chunk_gated_delta_rule(*exact)[0] - right).abs().max() > 1e-9
    rounded = [item.bfloat16() for item in exact]
    wide = gated_delta_rule(*(item.float() for item in rounded))[0]
    assert gated_delta_rule(*rounded)[0].equal(wide.bfloat16())


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"])
def test_the_oracle_has_it_and_an_engine_has_what_transformers_ships(name: str, tmp_path: Path) -> None:
    def rules(**options: tuple[str, ...]) -> set[str]:
        model = load_model(write_scaled(name, tmp_path), torch.float32, **options)
        found = (getattr(item, "chunk_gated_delta_rule", None) for item in model.modules())
        return {item.__name__ for item in found if item is not None}

    assert rules() == {"gated_delta_rule"}
    assert rules(fixes=()) == {"torch_chunk_gated_delta_rule"}
