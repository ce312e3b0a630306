"""The reference gated delta net: against the recurrence token by token, and each packed sequence by itself.

What this does not exercise: megatron-core's layer around it (tests/dist/test_gated_delta_nets.py).
"""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from verifier.errors import UsageError
from verifier.platform.cpu_delta import causal_conv1d, chunk_gated_delta_rule, l2norm

HEADS, KEY, VALUE, CHANNELS, WIDTH = 3, 5, 4, 6, 4
LENGTHS = (7, 1, 9)
"""Rows of packed sequences: below and above the convolution's width."""
BOUNDARIES = torch.tensor([0, *LENGTHS]).cumsum(0).int()


def _gates_and_rows(rows: int, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """Inputs of the gated delta rule: k of length 1, decay within 0 and 1."""
    draw = torch.Generator().manual_seed(rows)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(1, rows, HEADS, *shape, generator=draw, dtype=torch.float64)

    found = {"q": drawn(KEY), "k": functional.normalize(drawn(KEY), dim=-1), "v": drawn(VALUE)}
    found |= {"g": -functional.softplus(drawn()), "beta": drawn().sigmoid()}
    return {name: value.to(dtype) for name, value in found.items()}


def _by_token(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, g: torch.Tensor, beta: torch.Tensor) -> torch.Tensor:
    """Gated delta rule of one sequence: a state [key, value] per head, faded, corrected and read at each token."""
    rows = []
    for head in range(HEADS):
        state = torch.zeros(KEY, VALUE, dtype=torch.float64)
        for now in range(q.shape[1]):
            key = k[0, now, head]
            state = state * g[0, now, head].exp()
            state = state + beta[0, now, head] * torch.outer(key, v[0, now, head] - key @ state)
            rows.append(q[0, now, head] @ state / KEY**0.5)
    return torch.stack(rows).view(HEADS, -1, VALUE).transpose(0, 1)[None]


def _convolved(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Convolution of one sequence by its definition: row t reads rows t - 3 to t."""
    rows = []
    for now in range(x.shape[1]):
        row = torch.zeros(CHANNELS, dtype=x.dtype) if bias is None else bias
        for back in range(min(WIDTH, now + 1)):
            row = row + weight[:, WIDTH - 1 - back] * x[0, now - back]
        rows.append(row * torch.sigmoid(row))
    return torch.stack(rows)[None]


def _same_with_gradients(actual: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-13)
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(3), dtype=expected.dtype)
    found, wanted = (torch.autograd.grad((side * weights).sum(), inputs) for side in (actual, expected))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-11)


def test_the_rule_and_its_gradients_are_those_of_the_recurrence_in_each_packed_sequence() -> None:
    held = {name: value.requires_grad_() for name, value in _gates_and_rows(sum(LENGTHS)).items()}
    parts = zip(*(value.split(LENGTHS, dim=1) for value in held.values()), strict=True)
    expected = torch.cat([_by_token(*part) for part in parts], dim=1)
    _same_with_gradients(chunk_gated_delta_rule(**held, cu_seqlens=BOUNDARIES)[0], expected, list(held.values()))


def test_the_rule_without_boundaries_is_that_of_one_sequence() -> None:
    held = _gates_and_rows(20)
    torch.testing.assert_close(chunk_gated_delta_rule(**held)[0], _by_token(**held), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("with_bias", [True, False])
def test_the_convolution_and_its_gradients_are_those_of_the_definition_in_each_packed_sequence(with_bias: bool) -> None:
    draw = torch.Generator().manual_seed(4)
    shapes = ((1, sum(LENGTHS), CHANNELS), (CHANNELS, WIDTH), (CHANNELS,))
    x, weight, drawn = (torch.randn(*shape, generator=draw, dtype=torch.float64).requires_grad_() for shape in shapes)
    bias = drawn if with_bias else None
    expected = torch.cat([_convolved(part, weight, bias) for part in x.split(LENGTHS, dim=1)], dim=1)
    actual, _ = causal_conv1d(x, weight, bias, activation="silu", cu_seqlens=BOUNDARIES)
    _same_with_gradients(actual, expected, [x, weight, *([drawn] if with_bias else [])])


def test_a_norm_divides_by_the_length_and_keeps_the_dtype() -> None:
    x = torch.randn(2, 3, 4, 8, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(l2norm, (x,))
    torch.testing.assert_close(l2norm(x.detach()).norm(dim=-1), torch.ones(2, 3, 4).double(), rtol=1e-5, atol=0)
    assert l2norm(torch.zeros(1, 4, dtype=torch.bfloat16)).tolist() == [[0, 0, 0, 0]]
    assert l2norm(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("rows", [30, 64, 200])
def test_transformers_in_chunks_of_64_computes_the_same_within_float32(rows: int) -> None:
    held = _gates_and_rows(rows, torch.float32)
    chunked, _ = torch_chunk_gated_delta_rule(held["q"], held["k"], held["v"], held["g"], held["beta"])
    torch.testing.assert_close(chunk_gated_delta_rule(**held)[0], chunked, rtol=1e-5, atol=1e-5)


def test_an_output_has_the_dtype_of_its_input() -> None:
    held = _gates_and_rows(5, torch.bfloat16)
    assert chunk_gated_delta_rule(**held)[0].dtype == torch.bfloat16
    x = torch.zeros(1, 5, CHANNELS, dtype=torch.bfloat16)
    assert causal_conv1d(x, torch.zeros(CHANNELS, WIDTH), activation="swish")[0].dtype == torch.bfloat16


def test_what_the_layer_does_not_ask_for_is_refused() -> None:
    with pytest.raises(UsageError, match="knows neither states nor norms"):
        chunk_gated_delta_rule(**_gates_and_rows(2), output_final_state=True)
    with pytest.raises(UsageError, match="not gelu"):
        causal_conv1d(torch.zeros(1, 2, CHANNELS), torch.zeros(CHANNELS, WIDTH), activation="gelu")
