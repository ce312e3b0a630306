"""Fixes of megatron-core and megatron-bridge in the trainer's ranks, each installed for a run that asks for its id."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection
from typing import Any

from verifier.errors import UsageError
from verifier.platform.patch import Patch, apply, current
from verifier.platform.upstream_fixes import (
    BRIDGE_ADAPTERS,
    BRIDGE_POST_NORM,
    CUDNN_WIDTH,
    MEGATRON_COUNTS,
    MEGATRON_ROLLS,
)

INITIAL = "megatron.bridge.peft.utils:ParallelLinearAdapter._get_init_fn"
POST_NORM = "megatron.bridge.models.common.te_layers:TERowParallelLinearLayerNorm.__init__"
KEEP_BIAS = "megatron.core.transformer.moe.router:TopKRouter._maintain_float32_expert_bias"
ROLL = "megatron.core.transformer.multi_token_prediction:_roll_tensor_packed_seq"
PREPARE = "megatron.core.transformer.multi_latent_attention:_prepare_mla_core_attention_value"


GROUPS = "megatron.core.transformer.moe.moe_utils:group_limited_topk"


def install(fixes: Collection[str]) -> None:
    """Replace what the fixes replace for the whole process; the others are called where a trainer is built.

    Raises:
        UsageError: a function to replace is not the one that was read.
    """
    if CUDNN_WIDTH in fixes:
        apply([Patch(PREPARE, _unpadded, takes="parallel_attention query value packed_seq_params")])
    if BRIDGE_ADAPTERS in fixes:
        apply([Patch(INITIAL, _by_whole_width, takes="self init_method")])
    if BRIDGE_POST_NORM in fixes:
        apply([Patch(POST_NORM, _by_config(current(POST_NORM)), takes="self input_size output_size config kwargs")])
    if MEGATRON_COUNTS in fixes:
        apply([Patch(KEEP_BIAS, _counting(current(KEEP_BIAS)), takes="self")])
    if MEGATRON_ROLLS in fixes:
        apply([Patch(ROLL, _where_rows_are(current(ROLL)), takes="tensor shifts dims packed_seq_params cp_group")])


def _where_rows_are(roll: Callable[..., Any]) -> Callable[..., Any]:
    """Shift of packed rows by one within each sequence, which begins behind the padding of the one before.

    Source:
        Megatron-LM #6205, which reads these lengths too; tests/dist/test_further_tokens.py fails when this can go.
    """

    def shift(tensor: Any, shifts: int, dims: int, packed_seq_params: Any, cp_group: Any = None) -> Any:
        told = dataclasses.replace(packed_seq_params, cu_seqlens_q=packed_seq_params.cu_seqlens_q_padded)
        return roll(tensor, shifts, dims, told, cp_group)

    return shift


def _by_config(make: Callable[..., None]) -> Callable[..., None]:
    """Constructor of a row-parallel linear with a norm behind it, whose epsilon is then that of the config.

    Source:
        Megatron-Bridge #5712.
    """

    def make_with_epsilon(self: Any, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        make(self, input_size, output_size, config=config, **kwargs)
        self.post_layernorm.eps = config.layernorm_epsilon

    return make_with_epsilon


def _counting(keep_bias: Callable[[Any], None]) -> Callable[[Any], None]:
    """Start of a router's forward pass: its score bias is brought back to float32, and its counter of tokens too.

    megatron-core wraps a bf16 model so that the counter of tokens, a buffer, is rounded with all else, and forgets it
    where it brings the bias back. Counts above 256 are rounded, and the rate of the bias with them: 1e-3 is 0.00099945.

    Source:
        Megatron-LM #7081, which counts in integers: core/transformer/moe/router.py, `_maintain_float32_expert_bias`.
    """
    import torch

    def keep(self: Any) -> None:
        keep_bias(self)
        if self.local_tokens_per_expert is not None:
            self.local_tokens_per_expert.data = self.local_tokens_per_expert.data.to(torch.float32)

    return keep


def _by_whole_width(self: Any, init_method: str) -> Callable[[Any], Any]:
    """Initial values of an adapter's matrix: Glorot's normal distribution by the whole A, or zeros.

    megatron-bridge 0.6.2 applies torch's function to a shard, whose width is that of the whole over tp where the linear
    is row-parallel. `self` is a ParallelLinearAdapter under construction.

    Source:
        Megatron-Bridge #5840, mended by #5843.
    """
    import torch

    def draw(shard: Any) -> Any:
        width = shard.shape[1] * (self.tp_group.size() if self.input_is_parallel else 1)
        return torch.nn.init.normal_(shard, std=(2 / (width + self.dim)) ** 0.5)

    known = {"xavier": draw, "zero": torch.nn.init.zeros_}
    if init_method not in known:
        raise UsageError(f"--fix {BRIDGE_ADAPTERS} knows initial values {', '.join(known)}, not {init_method}")
    return known[init_method]


def _unpadded(
    parallel_attention: Any, query: Any, value: Any, packed_seq_params: Any
) -> tuple[Any, bool, int | None, int | None]:
    """The value as it is, and that nothing is to be cut off its output.

    megatron-core 0.19.2 pads the values of latent attention to the width of its keys, 128 to 192, where sequences are
    packed. For packed sequences of 192 elements per head in keys and values, cuDNN 9.14 on Hopper returns gradients of
    queries, keys and values whose elements from the 128th on are zero, or lack part of the sum: the rotated part of
    each head is not trained on. With values of 128 elements its gradients are right; cuDNN 9.19 has both right.
    """
    width = None if value is None else value.shape[-1]
    return value, False, width, width


def choose_groups_by_best() -> None:
    """Choose groups of experts by the best score of each, as DeepSeek-V2 does.

    Source:
        Megatron-LM #1378: core/transformer/moe/moe_utils.py, `group_limited_topk`.
    """
    apply([Patch(GROUPS, best_of_groups, takes="scores topk num_tokens num_experts num_groups group_topk")])


def best_of_groups(scores: Any, topk: int, num_tokens: int, num_experts: int, num_groups: int, group_topk: int) -> Any:
    """Scores and experts, [tokens, topk], of the groups whose best `scores` [tokens, experts] are the greatest."""
    best = scores.view(num_tokens, num_groups, -1).amax(dim=-1)
    left_out = best.new_ones(best.shape).scatter(1, best.topk(group_topk)[1], 0).bool()
    return scores.masked_fill(left_out.repeat_interleave(num_experts // num_groups, 1), -math.inf).topk(topk)


def index_states(optimizer: Any) -> None:
    """Say where each parameter's state is, in the order that its group has: float32 parameters before all others.

    megatron-core says so before it has put them in that order. Of a bf16 model that keeps some parameters in float32,
    as state-space layers do, a checkpoint would then hold the states of others; training does not ask.

    Source:
        Megatron-LM #2777, mended by #5835: core/optimizer/distrib_optimizer.py, `_build_model_and_main_param_groups`;
        tests/contracts/test_megatron_fixes.py fails when this can go.
    """
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        for group, (kept, rounded) in enumerate(zip(part.model_fp32_groups, part.model_float16_groups, strict=True)):
            for order, parameter in enumerate([*kept, *rounded]):
                part.model_param_group_index_map[parameter] = group, order


def mark_sinks(chunks: list[Any]) -> list[Any]:
    """Mark attention sinks as divided over tensor-parallel ranks, so that the norm of gradients has those of all.

    `chunks` are this rank's loaded modules, not yet wrapped: an optimizer copies the marks when it is made. By then
    megatron-core has marked them as whole, as all parameters that have no mark.

    Source:
        Megatron-LM #7452; megatron-core 0.19.2, core/transformer/dot_product_attention.py, where `softmax_offset` has
        one score for each head of a rank.
    """
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith(".softmax_offset"):
                parameter.tensor_model_parallel, parameter.partition_dim, parameter.partition_stride = True, 0, 1
    return chunks


def keep_float32(chunks: list[Any], stored: Collection[str]) -> list[Any]:
    """Keep in float32 those parameters of state-space layers and gated delta nets that the checkpoint does.

    megatron-core makes ``A_log`` and ``D`` of the former in float32 and then rounds them with all else when it wraps
    the model for bf16, and makes ``A_log`` of the latter in bf16; megatron-bridge spares what a module marks.

    `chunks` are this rank's loaded modules, not yet wrapped; `stored` has the last parts of the names of what the
    checkpoint stores in float32.

    Source:
        miles #975, of another model with such layers; megatron-bridge 0.6.2, models/model_provider.py,
        `_apply_mixed_precision_wrapper`.
    """
    from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet
    from megatron.core.ssm.mamba_mixer import MambaMixer

    for chunk in chunks:
        for module in chunk.modules():
            if isinstance(module, MambaMixer | GatedDeltaNet):
                kept = [leaf for leaf in ("dt_bias", "A_log", "D") if leaf in stored and hasattr(module, leaf)]
                module._keep_in_float32_parameter_names = kept
                for leaf in kept:
                    parameter = getattr(module, leaf)
                    parameter.data = parameter.data.float()
    return chunks
