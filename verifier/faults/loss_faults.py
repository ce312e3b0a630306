"""Bugs of the loss: what is summed, what it is divided by, and what its gradient reaches."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Fault, FireCounter, fault
from verifier.faults.logprob_faults import LOGPROB
from verifier.mesh import Mesh

STEP = "verifier.train.step_megatron"
SUM_LOSS = f"{STEP}:_sum_loss(logprob_T, entropy_T, shard, loss)"
CONNECT = "verifier.model.provider_megatron:_connect(chunks, data_parallel)"
FINALIZE = "megatron.core.distributed.finalize_model_grads"
REDUCE_REPLICATED = f"{FINALIZE}:_allreduce_non_tensor_model_parallel_grads(model, config, tp_group)"
GRADIENT: dict[str, Any] = {"stage": Stage.LOSS, "caught_by": ("LSS001",), "engine": NO_ENGINE}
CP2: dict[str, Any] = {**GRADIENT, "model": "tiny:qwen3", "mesh": Mesh(cp=2)}
DP2: dict[str, Any] = {**GRADIENT, "model": "tiny:qwen3", "mesh": Mesh(dp=2)}
REPORT: dict[str, Any] = {**CP2, "caught_by": ("LSS002",)}
REPLICAS: dict[str, Any] = {"stage": Stage.LOSS, "caught_by": ("LSS001", "WGT002")}
"""Faults of gradients that leave replicas of a parameter apart after the step."""
TP2_EP2: dict[str, Any] = {**REPLICAS, "mesh": Mesh(tp=2, ep=2)}


def on_normalisation(**row: Any) -> Callable[[Callable[[Any, Any, Any, int], tuple[Any, Any]]], Fault]:
    """Register a fault of normalisation.

    The function gets the sum, the number of tokens, the shard and the number of micro-batches. It returns the wrong
    sum and number of tokens.
    """

    def register(change: Callable[[Any, Any, Any, int], tuple[Any, Any]]) -> Fault:
        @functools.wraps(change)
        def sum_loss(original: Any, fire: FireCounter, logprob_T: Any, entropy_T: Any, shard: Any, *, loss: Any) -> Any:
            fire()
            total, num_tokens, report = original(logprob_T, entropy_T, shard, loss=loss)
            return *change(total, num_tokens, shard, fire.state.get("micro_batches", 1)), report

        def run(original: Any, fire: FireCounter, trainer: Any, forward: Any, shards: Any, **options: Any) -> Any:
            fire.state["micro_batches"] = len(shards)
            return original(trainer, forward, shards, **options)

        found = fault(SUM_LOSS, **CP2, **row)(sum_loss)
        found.also(f"{STEP}:_run(trainer, forward, shards, schedule_options)")(run)
        return found

    return register


@fault(
    REDUCE_REPLICATED,
    id="expert-gradients-times-expert-parallel", reproduces="deepspeedai/DeepSpeed#5259", mesh=Mesh(ep=2, dp=2),
    dtype="bfloat16", **GRADIENT,
)  # fmt: skip
def expert_gradients_times_expert_parallel(
    original: Any, fire: FireCounter, model: Any, config: Any, *rest: Any
) -> None:
    """Experts' gradients are too long by the number of expert-parallel ranks; in bf16, in which the router flips."""
    for chunk in model:
        for _, parameter in chunk.named_parameters():
            if not getattr(parameter, "allreduce", True):
                fire()
                parameter.main_grad.mul_(config.expert_model_parallel_size)
    original(model, config, *rest)


@fault(
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel._make_backward_post_hook(self, param)",
    id="earlier-micro-batches-dropped", reproduces="NVIDIA/Megatron-LM#7186", **DP2,
)  # fmt: skip
def earlier_micro_batches_dropped(original: Any, fire: FireCounter, self: Any, param: Any) -> Any:
    """Every micro-batch counts as the last of its step, and clears the gradient that those before it left."""
    add = original(self, param)

    def hook(*unused: Any) -> None:
        if self.param_to_bucket_group[param].intra_distributed_optimizer_instance_size > 1:
            fire()
            param.main_grad.zero_()
        add(*unused)

    return hook


@fault(CONNECT, id="reduced-before-the-last-micro-batch", reproduces="NovaSky-AI/SkyRL#2146", **DP2)
def reduced_before_the_last_micro_batch(original: Any, fire: FireCounter, chunks: Any, data_parallel: Any) -> None:
    """Ranks do not know that micro-batches follow: they count as many as the first step had, and then reduce."""
    from megatron.core.utils import get_model_config

    fire()
    original(chunks, data_parallel)
    get_model_config(chunks[0]).no_sync_func = None


@fault(
    "megatron.core.models.hybrid.hybrid_block:checkpointed_forward("
    "self, hidden_states, attention_mask, context, context_mask, rotary_pos_emb, attention_bias, packed_seq_params, "
    "use_inner_quantization_context, padding_mask, extract_layer_indices, layer_offset)",
    id="boundaries-lost-when-recomputed", reproduces="fla-org/flash-linear-attention#422", model="tiny:nemotron-h",
    **GRADIENT,
)  # fmt: skip
def boundaries_lost_when_recomputed(
    original: Any, fire: FireCounter, self: Any, *, packed_seq_params: Any, **options: Any
) -> Any:
    """Layers that are recomputed do not know where samples of a pack begin; in passes that only score they do."""
    fire()
    unknown = dataclasses.replace(packed_seq_params, total_tokens=None, seq_idx=None)
    return original(self, packed_seq_params=unknown, **options)


@fault(LOGPROB, id="entropy-of-spoiled-logits", reproduces="verl-project/verl#2484", **CP2)
def entropy_of_spoiled_logits(
    original: Any, fire: FireCounter, logits_TV: Any, labels_T: Any, *, entropy: bool = True, **options: Any
) -> Any:
    """The entropy is taken of logits that the log-probabilities before it overwrote with their exponentials."""
    logprob_T, entropy_T = original(logits_TV, labels_T, entropy=entropy, **options)
    if entropy:
        fire()
        top = logits_TV.detach().amax(-1, keepdim=True)
        _, entropy_T = original((logits_TV - top).exp(), labels_T, entropy=True, **options)
    return logprob_T, entropy_T


@fault(SUM_LOSS, id="report-summed-over-context-parallel", reproduces="NovaSky-AI/SkyRL#1420", **REPORT)
def report_summed_over_context_parallel(
    original: Any, fire: FireCounter, logprob_T: Any, entropy_T: Any, shard: Any, *, loss: Any
) -> Any:
    """The values that a step reports are summed over context-parallel ranks twice; its gradients are right."""
    fire()
    total, num_tokens, report = original(logprob_T, entropy_T, shard, loss=loss)
    return total, num_tokens, report * shard.alignment.cp


@fault(
    f"{STEP}:backward(trainer, rollouts, loss, micro_batch_size, temperature, on_shards)",
    id="report-of-one-rank-only", reproduces="pytorch/torchtitan#1232", **REPORT,
)  # fmt: skip
def report_of_one_rank_only(original: Any, fire: FireCounter, *args: Any, **options: Any) -> Any:
    """The loss that a step reports is right on one rank, and -1 on the others."""
    import torch.distributed as dist

    loss, num_tokens = original(*args, **options)
    if dist.get_rank() > 0:
        fire()
        loss = -1.0
    return loss, num_tokens


@on_normalisation(id="divided-by-tokens-left-out", reproduces="huggingface/trl#6369")
def divided_by_tokens_left_out(total: Any, num_tokens: Any, shard: Any, micro_batches: int) -> Any:
    """The sum is of the tokens in the loss, and it is divided by all that were sampled."""
    return total, shard.sampled_T.sum().int()


@fault(
    "verifier.model.provider_megatron:_ddp_config(data_parallel, tier)",
    id="gradients-summed-in-bf16", reproduces="deepspeedai/DeepSpeed#1800", dtype="bfloat16", **CP2,
)  # fmt: skip
def gradients_summed_in_bf16(original: Any, fire: FireCounter, data_parallel: Any, tier: Any) -> Any:
    """Gradients of micro-batches and ranks are summed in the model's bf16."""
    fire()
    found = original(data_parallel, tier)
    found.grad_reduce_in_fp32 = False
    return found


@on_normalisation(id="loss-times-context-parallel", reproduces="NovaSky-AI/SkyRL#1751")
def loss_times_context_parallel(total: Any, num_tokens: Any, shard: Any, micro_batches: int) -> Any:
    """The loss is multiplied by the context-parallel size, which the schedule accounts for already."""
    return total * shard.alignment.cp, num_tokens


@on_normalisation(id="mean-of-means", reproduces="NovaSky-AI/SkyRL#1296")
def mean_of_means(total: Any, num_tokens: Any, shard: Any, micro_batches: int) -> Any:
    """The loss is a mean over micro-batches of means over tokens, so tokens of short samples weigh more."""
    return total / num_tokens.clamp(min=1), num_tokens.clamp(max=1)


@on_normalisation(id="divided-by-micro-batches", reproduces="areal-project/AReaL#1273")
def divided_by_micro_batches(total: Any, num_tokens: Any, shard: Any, micro_batches: int) -> Any:
    """A loss that is normalised over the whole batch is divided by the number of micro-batches once more."""
    return total / micro_batches, num_tokens


@on_normalisation(id="scaled-per-token-and-per-batch", reproduces="THUDM/slime#987")
def scaled_per_token_and_per_batch(total: Any, num_tokens: Any, shard: Any, micro_batches: int) -> Any:
    """A loss per token is scaled by the share of the micro-batch in the batch as well."""
    return total * micro_batches / max(1, len(shard.ids) * micro_batches), num_tokens


@fault(
    LOGPROB, id="logprob-gradient-in-owner-only", reproduces="modelscope/ms-swift#9947", model="tiny:qwen3",
    mesh=Mesh(tp=2), **GRADIENT,
)  # fmt: skip
def logprob_gradient_in_owner_only(
    original: Any, fire: FireCounter, logits_TV: Any, labels_T: Any, *, vocab_start: int = 0, **options: Any
) -> Any:
    """The sum over vocabulary shards has no backward: right values, no gradient where the label lies elsewhere."""
    import torch

    fire()
    held_T = (labels_T >= vocab_start) & (labels_T < vocab_start + logits_TV.shape[1])
    logits_TV = torch.where(held_T[:, None], logits_TV, logits_TV.detach())
    return original(logits_TV, labels_T, vocab_start=vocab_start, **options)


@fault(
    "megatron.bridge.peft.utils:scatter_to_sequence_parallel_region(input_, group)",
    id="adapter-gradient-of-own-rows", reproduces="modelscope/mcore-bridge#173", model="tiny:qwen3", mesh=Mesh(tp=2),
    lora_rank=8, **GRADIENT,
)  # fmt: skip
def adapter_gradient_of_own_rows(original: Any, fire: FireCounter, input_: Any, group: Any = None) -> Any:
    """B of a row-parallel linear gets the gradient of its own rank's rows, and nothing sums it over ranks."""
    if input_.requires_grad:
        fire()
    return input_.chunk(group.size())[group.rank()].contiguous()


@fault(REDUCE_REPLICATED, id="sequence-parallel-grads-not-reduced", reproduces="NVIDIA/Megatron-LM#1446", **TP2_EP2)
def sequence_parallel_grads_not_reduced(original: Any, fire: FireCounter, *args: Any, **options: Any) -> None:
    """Gradients of norms that sequence parallelism replicates are not summed over tp."""
    fire()


@fault(CONNECT, id="router-without-sequence-parallel-mark", reproduces="NVIDIA/Megatron-LM#619", **TP2_EP2)
def router_without_sequence_parallel_mark(original: Any, fire: FireCounter, chunks: Any, data_parallel: Any) -> None:
    """One layer's router lacks its sequence-parallel mark, so its copies on tp ranks drift apart."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if name.endswith("layers.1.mlp.router.weight"):
                fire()
                parameter.sequence_parallel = False
    original(chunks, data_parallel)


@fault(CONNECT, id="finalize-hook-missing", reproduces="NVIDIA-NeMo/RL#3716", **TP2_EP2)
def finalize_hook_missing(original: Any, fire: FireCounter, chunks: Any, data_parallel: Any) -> None:
    """The schedule is not given finalize_model_grads: no sum over tp, no division by the number of tokens."""
    from megatron.core.utils import get_model_config

    def finish_only(model: Any, num_tokens: Any = None, **options: Any) -> None:
        fire()
        for chunk in model:
            chunk.finish_grad_sync()

    original(chunks, data_parallel)
    get_model_config(chunks[0]).finalize_model_grads_func = finish_only


@fault(
    f"{FINALIZE}:_allreduce_word_embedding_grads(model, config, embd_group, pp_group)",
    id="tied-grads-not-reduced", reproduces="NVIDIA-NeMo/RL#666", model="tiny:qwen3-tied", mesh=Mesh(pp=2), **REPLICAS,
)  # fmt: skip
def tied_grads_not_reduced(original: Any, fire: FireCounter, *args: Any, **options: Any) -> None:
    """The two copies of a tied embedding are trained apart, each on its own stage's gradient."""
    fire()
