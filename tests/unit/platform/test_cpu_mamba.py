"""The reference state-space layer: against transformers in one chunk, and each packed sequence by itself.

What this does not exercise: megatron-core's mixer around it (tests/dist/test_export_names.py, test_trainer_parity.py).
"""

from __future__ import annotations

import pytest
import torch

from verifier.megatron.token_layout import cp_rows
from verifier.platform.cpu_mamba import GroupedRMSNorm, packed_rows, split_conv1d_scan

HEADS, HEAD, GROUPS, STATE = 4, 6, 2, 5
INNER, CONVOLVED = HEADS * HEAD, HEADS * HEAD + 2 * GROUPS * STATE


@pytest.fixture
def parameters() -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return {
        "conv1d_weight": torch.randn(CONVOLVED, 4, generator=draw),
        "conv1d_bias": torch.randn(CONVOLVED, generator=draw),
        "dt_bias": torch.randn(HEADS, generator=draw),
        "A": -torch.rand(HEADS, generator=draw) - 0.1,
        "D": torch.randn(HEADS, generator=draw),
    }


def _scan(zxbcdt: torch.Tensor, parameters: dict[str, torch.Tensor], seq_idx: torch.Tensor | None = None):
    return split_conv1d_scan(
        zxbcdt, **parameters, chunk_size=8, activation="silu", headdim=HEAD, ngroups=GROUPS, norm_before_gate=False,
        seq_idx=seq_idx,
    )  # fmt: skip


def _input(rows: int) -> torch.Tensor:
    return torch.randn(1, rows, INNER + CONVOLVED + HEADS, generator=torch.Generator().manual_seed(2))


def test_the_scan_is_the_recurrence(parameters: dict[str, torch.Tensor]) -> None:
    zxbcdt = _input(11)
    z, xbc, dt = zxbcdt[0].double().split([INNER, CONVOLVED, HEADS], dim=-1)
    weight, bias = parameters["conv1d_weight"].double(), parameters["conv1d_bias"].double()
    before = torch.cat([torch.zeros(3, CONVOLVED), xbc])
    rows, state = [], torch.zeros(HEADS, HEAD, STATE, dtype=torch.float64)
    for now in range(11):
        convolved = torch.nn.functional.silu((before[now : now + 4].T * weight).sum(-1) + bias)
        x, B, C = (part.view(-1, size) for part, size in zip(
            convolved.split([INNER, GROUPS * STATE, GROUPS * STATE]), (HEAD, STATE, STATE), strict=True))  # fmt: skip
        step = torch.nn.functional.softplus(dt[now] + parameters["dt_bias"])
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            state[head] *= (step[head] * parameters["A"][head]).exp()
            state[head] += step[head] * x[head][:, None] * B[group][None]
        reads = [state[head] @ C[head // (HEADS // GROUPS)] for head in range(HEADS)]
        rows.append((torch.stack(reads) + parameters["D"][:, None] * x).flatten())
    expected = torch.stack(rows) * torch.nn.functional.silu(z)
    torch.testing.assert_close(_scan(zxbcdt, parameters)[0].double(), expected, rtol=1e-5, atol=1e-6)


def test_a_packed_sequence_is_the_sequence_alone_bit_for_bit(parameters: dict[str, torch.Tensor]) -> None:
    zxbcdt, lengths = _input(12), [3, 1, 8]
    seq_idx = torch.arange(3).repeat_interleave(torch.tensor(lengths))[None].int()
    packed = _scan(zxbcdt, parameters, seq_idx).split(lengths, dim=1)
    for part, alone in zip(packed, zxbcdt.split(lengths, dim=1), strict=True):
        assert torch.equal(part, _scan(alone, parameters))
    assert not torch.equal(_scan(zxbcdt, parameters)[:, 3:], torch.cat(packed, dim=1)[:, 3:])


def test_gradients_are_those_of_the_function(parameters: dict[str, torch.Tensor]) -> None:
    leaves = [value.double().requires_grad_(True) for value in (_input(5), *parameters.values())]

    def scan(zxbcdt: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return _scan(zxbcdt, dict(zip(parameters, values, strict=True)))

    assert torch.autograd.gradcheck(scan, leaves)


def test_the_norm_is_taken_group_by_group() -> None:
    norm = GroupedRMSNorm(6, eps=0.0, group_size=3)
    norm.weight.data = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    x = torch.tensor([[3.0, 4.0, 0.0, 30.0, 40.0, 0.0]])
    rms = 5 / 3**0.5
    assert norm(x)[0].tolist() == pytest.approx([3 / rms, 8 / rms, 0, 12 / rms, 20 / rms, 0])


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_rows_of_a_context_parallel_rank_are_those_of_the_packer(cp: int) -> None:
    boundaries = torch.tensor([0, 8, 32, 48], dtype=torch.int32)
    for rank in range(cp):
        rows = packed_rows(boundaries, 48, cp, rank)
        assert rows.tolist() == cp_rows(boundaries.numpy(), cp, rank).tolist()
