"""The gradients of packed attention: which cuDNN has a bug, that the trainer goes around it, and that it is caught."""

from __future__ import annotations

import pytest
import torch

from tests.dist.clean_case import judge
from tests.h100.models import model
from tests.h100.test_faults import verdicts
from verifier.config import EngineOptions, RoundtripConfig
from verifier.core import store
from verifier.platform.upstream_fixes import CUDNN_WIDTH
from verifier.report import render_text, report_of

pytestmark = pytest.mark.h100(gpus=1)
HEADS, KEYS, VALUES = 8, 192, 128
LENGTHS = (17, 60, 33)
ROUNDING = 0.02
"""bf16 operands, of which each product is rounded once: 0.003 was measured."""
MENDED = (9, 19, 0)
"""Of cuDNN: 9.14.0 has the bug, 9.19.0 does not; both were run."""


@pytest.mark.parametrize("values", [VALUES, KEYS])
def test_backward_of_packed_sequences(values, measured):
    """Values as wide as keys, 192, are lost by an old cuDNN: `verifier/platform/upstream_fixes_megatron.py`."""
    mended = values == VALUES or cudnn_version() >= MENDED
    found, expected = attention(values, fused=True), attention(values, fused=False)
    lost = [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, expected, strict=True)]
    measured(values=values, cudnn=list(cudnn_version()), output_off=lost[0], gradients_off=lost[1:])
    assert lost[0] < ROUNDING
    assert all(off < ROUNDING for off in lost[1:]) is mended
    assert mended or not found[1][..., 128:].any()


def attention(values, *, fused):
    """Output [T, HEADS, V], and the gradients of queries, keys and values: Transformer Engine's in bf16, or float64."""
    torch.manual_seed(0)
    num_tokens = sum(LENGTHS)
    sizes = ((num_tokens, HEADS, KEYS), (num_tokens, HEADS, KEYS), (num_tokens, HEADS, values))
    drawn = [torch.randn(size, device="cuda").bfloat16() for size in sizes]
    inputs = [(item if fused else item.double()).requires_grad_() for item in drawn]
    weight = torch.randn(num_tokens, HEADS, values, device="cuda").bfloat16()
    output = (engine_attention if fused else own_attention)(*inputs)
    output.backward(weight.to(output.dtype))
    return [output.detach(), *(item.grad for item in inputs)]


def engine_attention(query, key, value):
    from transformer_engine.pytorch import DotProductAttention

    ends = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device="cuda")
    layer = DotProductAttention(HEADS, (KEYS, value.shape[-1]), qkv_format="thd", attn_mask_type="padding_causal")
    output = layer(
        query, key, value, cu_seqlens_q=ends, cu_seqlens_kv=ends, max_seqlen_q=max(LENGTHS), max_seqlen_kv=max(LENGTHS)
    )
    return output.view(*query.shape[:2], -1)


def cudnn_version():
    """Of the one that Transformer Engine runs, which need not be torch's."""
    from transformer_engine.pytorch.utils import get_cudnn_version

    return tuple(get_cudnn_version())


def own_attention(query, key, value):
    parts = zip(*(item.split(LENGTHS) for item in (query, key, value)), strict=True)
    return torch.cat([
        torch.nn.functional.scaled_dot_product_attention(
            *(item.transpose(0, 1) for item in part), is_causal=True
        ).transpose(0, 1)
        for part in parts
    ])  # fmt: skip


def test_padded_values_are_caught_and_healed(runner, measured, tmp_path):
    """As shipped, where cuDNN has the bug: the report names it. With the fix, the run holds."""
    trace = runner.roundtrip(config_of(tmp_path / "as-shipped"))
    caught, first = verdicts(trace)
    measured(fault="latent-values-padded", caught=caught, first_bad_stage=first)
    assert (caught, first) == (([], None) if cudnn_version() >= MENDED else (["LSS001"], "loss"))
    shown = render_text(report_of(store.read(trace), str(trace)))
    assert (f"--fix {CUDNN_WIDTH}" in shown) is (cudnn_version() < MENDED)
    judge(runner.roundtrip(config_of(tmp_path / "fixed", fixes=(CUDNN_WIDTH,))))


def config_of(folder, **options):
    return RoundtripConfig(
        model=model("deepseek-v3"), trace=folder, dtype="bfloat16", engine=EngineOptions(kind="hf"), cycles=1, **options
    )  # fmt: skip
