"""The CPU tier's attention with sinks, or with scores bent to a bound, against transformers' own; else torch's.

The first compute in float32; what they may differ by from transformers in float64 is what transformers' rounding makes.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention
from transformers.models.gemma2 import modeling_gemma2
from transformers.models.gpt_oss import modeling_gpt_oss

LENGTH, HEADS, GROUPS, WIDTH, WINDOW, SCALE = 24, 4, 2, 8, 6, 0.3


def attended(attend, dtype=torch.float32):
    """Values of an attention over seeded rows, and the gradients of rows and sinks."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, LENGTH, HEADS, WIDTH), *[(1, LENGTH, GROUPS, WIDTH)] * 2, (HEADS,))
    leaves = [(3 * torch.randn(shape, generator=generator)).to(dtype).requires_grad_() for shape in shapes]
    values = attend(*leaves)
    (values * torch.randn(values.shape, generator=generator).to(dtype)).sum().backward()
    return [values.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def by_transformers(module, forward, **options):
    behind = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    mask = torch.zeros(LENGTH, LENGTH).masked_fill((behind < 0) | (behind > WINDOW), float("-inf"))[None, None]

    def attend(query, key, value, sinks):
        owner = SimpleNamespace(num_key_value_groups=HEADS // GROUPS, training=False, sinks=sinks)
        rows = [rows.transpose(1, 2) for rows in (query, key, value)]
        return getattr(module, forward)(owner, *rows, mask, scaling=SCALE, **options)[0]

    return attend


@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex")
@pytest.mark.parametrize("bent", [False, True], ids=["sinks", "softcap"])
def test_values_and_gradients_are_those_of_transformers(bent):
    from verifier.platform.cpu_attention import _causal

    softcap = 5.0 if bent else None
    mine = attended(
        lambda query, key, value, sinks: _causal(
            query, key, value, torch.arange(LENGTH), SCALE, WINDOW, softcap, None if bent else sinks
        )
    )
    options = {"softcap": softcap} if bent else {}
    theirs = by_transformers(modeling_gemma2 if bent else modeling_gpt_oss, "eager_attention_forward", **options)
    exact, rounded = attended(theirs, torch.float64), attended(theirs)
    assert len(mine) == len(exact) == (4 if bent else 5)
    for actual, expected, other in zip(mine, exact, rounded, strict=True):
        assert actual.norm() > 0.1
        assert (actual - expected).abs().max() < 4 * (other - expected).abs().max()


@pytest.fixture
def alone():
    """Makes stand-ins for Transformer Engine's attention on the only rank of a group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield stand_in
    dist.destroy_process_group()


def stand_in(layer=1, **different):
    from megatron.core.transformer.enums import AttnMaskType

    from verifier.platform.cpu_attention import TEDotProductAttention

    plain = {
        "attention_dropout": 0.0, "window_size": None, "window_attn_skip_freq": None, "softmax_type": "vanilla",
        "num_attention_heads": HEADS,
    }  # fmt: skip
    groups = SimpleNamespace(cp=dist.group.WORLD, tp=dist.group.WORLD)
    config = SimpleNamespace(**{**plain, **different})
    return TEDotProductAttention(config, layer, AttnMaskType.causal, "self", pg_collection=groups)


@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex")
def test_packed_rows_with_padding_are_those_of_torch(alone):
    """Grouped queries, value heads of another width, and padding that must not be read."""
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer.enums import AttnMaskType

    attention = alone()
    lengths, padded, starts = [5, 1, 7], [8, 4, 12], [0, 8, 12]
    query, key, value = torch.randn(24, HEADS, 8), torch.randn(24, GROUPS, 8), torch.randn(24, GROUPS, 6)
    for begin, length, size in zip(starts, lengths, padded, strict=True):
        for tensor in (query, key, value):
            tensor[begin + length : begin + size] = torch.nan
    ends, padded_ends = (torch.tensor(item, dtype=torch.int32) for item in ([0, 5, 6, 13], [0, 8, 12, 24]))
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=ends,
        cu_seqlens_kv=ends,
        cu_seqlens_q_padded=padded_ends,
        cu_seqlens_kv_padded=padded_ends,
    )
    actual = attention(query, key, value, None, AttnMaskType.padding_causal, packed_seq_params=packed)
    for begin, length, size in zip(starts, lengths, padded, strict=True):
        rows = slice(begin, begin + length)
        q, k, v = (tensor[rows].transpose(0, 1)[None] for tensor in (query, key, value))
        expected = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(actual[rows], expected.flatten(1), rtol=1e-5, atol=1e-6)
        assert (actual[begin + length : begin + size] == 0).all()
    one = attention(*(t[:5, None].repeat(1, 2, 1, 1) for t in (query, key, value)), None, AttnMaskType.causal)
    assert torch.equal(one[:, 0], actual[:5])
    assert torch.equal(one[:, 1], actual[:5])


@pytest.mark.filterwarnings("ignore:Transformer Engine and Apex")
@pytest.mark.parametrize(("layer", "rows_before"), [(1, 3), (2, 9)])
def test_windows_are_those_of_torch(alone, layer, rows_before):
    """The first of two layers sees three rows before its own, the other all of them."""
    from megatron.core.transformer.enums import AttnMaskType

    attention = alone(layer, window_size=(3, 0), window_attn_skip_freq=2)
    query, key, value = torch.randn(9, HEADS, 8), torch.randn(9, GROUPS, 8), torch.randn(9, GROUPS, 8)
    behind = torch.arange(9)[:, None] - torch.arange(9)
    actual = attention(*(tensor[:, None] for tensor in (query, key, value)), None, AttnMaskType.causal)
    q, k, v = (tensor.transpose(0, 1)[None] for tensor in (query, key, value))
    seen = (behind >= 0) & (behind <= rows_before)
    expected = scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)[0].transpose(0, 1)
    torch.testing.assert_close(actual[:, 0], expected.flatten(1), rtol=1e-5, atol=1e-6)
