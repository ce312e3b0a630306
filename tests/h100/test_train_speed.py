"""A training step of a 1.7 B model on one GPU: tokens/s and MFU against a bare Megatron loop; recording and judging.

The model has the sizes of Qwen3-1.7B; a step takes 65,536 tokens in packed micro-batches of sequences of 176 to 1,879
tokens: four micro-batches, or eight where a GPU of 80 GiB does not hold the bare loop's logits of 16,384 tokens. The
bare loop gets the same model, the same packs, moved to the GPU beforehand, and Transformer Engine's own cross-entropy;
it packs nothing, checks nothing and computes no entropy.
"""

from __future__ import annotations

import math

import pytest
import torch

from tests.bench.train_cost import GREATEST_COST, LEAST_SPEED, SAME_WORK, measure
from verifier.megatron import vocab_logprob
from verifier.megatron.pack import IGNORE_LABEL
from verifier.runs.resources import Deadline

pytestmark = [pytest.mark.h100(gpus=1), pytest.mark.timed]

SIZES = {
    "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16,
    "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 4096,
}  # fmt: skip
STEP_TOKENS = 65_536
PEAK_FLOPS = 989e12
"""Dense bf16 of an H100 or H200 SXM, by its data sheet."""
FUSED = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te", "apply_rope_fusion": True}
"""The bare loop's loss, and rotary embeddings in one kernel for both."""


def test_our_step_costs_little_more_than_a_bare_loop(runner, its_turn, measured, tmp_path):
    micro_batches = 4 if torch.cuda.get_device_properties(0).total_memory > 100 * 2**30 else 8
    args = {
        "sizes": SIZES, "dtype": "bfloat16", "tier": "cuda", "overrides": FUSED, "rows": STEP_TOKENS // micro_batches,
        "micro_batches": micro_batches, "rounds": 5, "most_rounds": 15,
    }  # fmt: skip
    cost = measure(runner.resources.launcher(Deadline(600)), tmp_path, args)
    measured(
        model="Qwen3-1.7B sizes, tied", tokens_per_step=cost.num_tokens, step_s=round(cost.step_s, 3),
        tokens_per_s=round(cost.tokens_per_s), mfu=round(cost.flops / cost.step_s / PEAK_FLOPS, 3),
        bare_step_s=round(cost.bare_s, 3), bare_mfu=round(cost.flops / cost.bare_s / PEAK_FLOPS, 3),
        speed_share=round(cost.speed, 3), recording_share=round(cost.recording, 4),
        recording_itself=round(cost.own, 4), judging_share=round(cost.judging, 4), spread=round(cost.spread, 4),
        comparisons_per_step=cost.num_compared, loss_and_norm_gap=cost.gap,
        peak_gib=round(cost.peak_gib, 1),
    )  # fmt: skip
    assert cost.gap < SAME_WORK
    assert cost.speed >= LEAST_SPEED
    assert cost.recording <= GREATEST_COST


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_kernels_agree_with_torch_operations(dtype, measured, monkeypatch):
    """Values and gradients at a real vocabulary, with rows that predict nothing, a temperature."""
    generator = torch.Generator("cuda").manual_seed(0)
    logits = torch.randn(512, 151_936, device="cuda", generator=generator).mul_(4).to(dtype)
    labels = torch.randint(0, 151_936, (512,), device="cuda", generator=generator)
    labels[::7] = IGNORE_LABEL
    logits[::7] = math.nan
    settings = {"temperature": 0.8}
    fused, fused_s = _graded(logits, labels, settings)
    monkeypatch.setattr(vocab_logprob, "is_fused", lambda _: False)
    chunked, chunked_s = _graded(logits, labels, settings)
    measured(dtype=str(dtype), rows=512, fused_ms=round(fused_s * 1e3, 2), chunked_ms=round(chunked_s * 1e3, 2))
    for got, want in zip(fused[:2], chunked[:2], strict=True):
        # Sums of 150,000 terms in another order.
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    # A share of at most 1, times a log-probability as above; then one rounding to bfloat16.
    torch.testing.assert_close(fused[2], chunked[2], rtol=2**-7 if dtype is torch.bfloat16 else 1e-4, atol=1e-7)


def _graded(logits, labels, settings):
    """([log-probability, entropy, gradient of a sum that weighs both], seconds of the second of two runs)."""
    for _ in range(2):
        leaf = logits.detach().requires_grad_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        values, entropy = vocab_logprob.vocab_parallel_logprob(leaf, labels, **settings)
        (values - entropy / 3).sum().backward()
        end.record()
        end.synchronize()
    return [values.detach(), entropy.detach(), leaf.grad], begin.elapsed_time(end) / 1e3
