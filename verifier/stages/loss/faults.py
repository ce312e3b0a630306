"""Bugs of the loss and of its backward pass: what is summed, what it is divided by, what its gradient reaches."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Call, fault, held, in_training
from verifier.mesh import Mesh
from verifier.stages.logprob.faults import GATES, LOGPROB, STEP

SUM_LOSS = f"{STEP}:_sum_loss(logprob_T, entropy_T, shard, loss)"
CONNECT = "verifier.model.provider_megatron:_connect(chunks, data_parallel)"
FINALIZE = "megatron.core.distributed.finalize_model_grads"
REDUCE_REPLICATED = f"{FINALIZE}:_allreduce_non_tensor_model_parallel_grads(model, config, tp_group)"
in_loss = functools.partial(fault, stage=Stage.LOSS, caught_by=("LSS001",), model="tiny:qwen3", engine=NO_ENGINE)
on_replicas = functools.partial(fault, stage=Stage.LOSS, caught_by=("LSS001", "WGT002"), mesh=Mesh(tp=2, ep=2))
"""Faults of gradients that leave replicas of a parameter apart after the step."""
in_policy_loss = functools.partial(in_training, stage=Stage.LOSS, caught_by=("LSS001",))
SAMPLED = ("algorithm=grpo", "verify.every=1")
"""Knobs of a run each of whose steps transformers computes too."""


@in_loss("QwenLM/FlashQLA#28", GATES, model="tiny:qwen3_next")
def gradient_of_the_decay_in_bfloat16(call: Call) -> Any:
    """The backward pass of a gated delta net's scan hands the gradient of its decay on in bf16."""
    decay, rate = call.faulty()
    if decay.requires_grad:
        decay.register_hook(lambda gradient: gradient.bfloat16().to(gradient.dtype))
    return decay, rate


@in_loss(
    "fla-org/flash-linear-attention#422",
    "megatron.core.models.hybrid.hybrid_block:checkpointed_forward("
    "self, hidden_states, attention_mask, context, context_mask, rotary_pos_emb, attention_bias, packed_seq_params, "
    "use_inner_quantization_context, padding_mask, extract_layer_indices, layer_offset)",
    model="tiny:nemotron-h",
)
def boundaries_lost_when_recomputed(call: Call) -> Any:
    """Layers that are recomputed do not know where samples of a pack begin; in passes that only score they do."""
    return call.faulty(packed_seq_params=dataclasses.replace(call.packed_seq_params, total_tokens=None, seq_idx=None))


@in_loss(
    "ISEEKYAN/Megatron-LM#79 (found in review)",
    "megatron.core.transformer.moe.router_replay:RouterReplay.get_replay_topk("
    "self, scores, topk, num_groups, group_topk, default_compute_topk)",
    model="tiny:qwen3-moe", cycles=3,
)  # fmt: skip
def gates_detached_when_replayed_again(call: Call) -> Any:
    """Routers that replay while activations are recomputed take stored scores, and their gradient is zero."""
    from megatron.core.transformer.moe.router_replay import RouterReplayAction

    if call.self.router_replay_action is not RouterReplayAction.REPLAY_BACKWARD:
        return call.original()
    return call.faulty(scores=call.scores.detach() + 0 * call.scores)


@in_loss(
    "EleutherAI/gpt-neox#1003",
    "megatron.core.models.common.embeddings.rope_utils:"
    "_apply_rotary_pos_emb_bshd(t, freqs, rotary_interleaved, mla_rotary_interleaved, mscale, multi_latent_attention)",
    model="tiny:qwen3-moe",
)
def angles_rounded_in_training(call: Call) -> Any:
    """Rotary angles are rounded to bf16 in passes with gradients alone; scores are right."""
    import torch

    if not torch.is_grad_enabled():
        return call.original()
    return call.faulty(freqs=call.freqs.bfloat16().to(call.freqs.dtype))


@in_loss("modelscope/ms-swift#9947", LOGPROB, dtype="bfloat16")
def few_rows_without_gradient(call: Call) -> Any:
    """One row in eight of a micro-batch has its log-probability and no gradient, in a bf16 run."""
    import torch

    kept_T = torch.arange(len(call.labels_T), device=call.labels_T.device) % 8 != 0
    return call.faulty(logits_TV=call.logits_TV.where(kept_T[:, None], call.logits_TV.detach()))


@in_loss(
    "NVIDIA-NeMo/RL#3169", "verifier.model.provider_megatron:_configure(provider, mesh, dtype, tier)",
    model="tiny:qwen3-moe", dtype="bfloat16",
)  # fmt: skip
def router_loss_left_on(call: Call) -> None:
    """A loss of the routers' own is left on in RL, here their z-loss with its usual 1e-3, in a bf16 run."""
    call.faulty()
    call.provider.moe_z_loss_coeff = 1e-3


@in_loss(
    "NVIDIA/Megatron-LM#7452 (kin: there its tokens were counted on each rank alone)",
    "verifier.model.provider_megatron:_configure(provider, mesh, dtype, tier)", model="tiny:glm4_moe-mtp",
)  # fmt: skip
def loss_of_further_tokens_left_on(call: Call) -> None:
    """The loss of a layer for further tokens (MTP) is left on in RL, with the 0.3 that megatron-bridge asks for."""
    call.faulty()
    call.provider.mtp_loss_scaling_factor = 0.3


@in_loss("NovaSky-AI/SkyRL#1420", SUM_LOSS, caught_by=("LSS002",), mesh=Mesh(cp=2))
def report_summed_over_context_parallel(call: Call) -> Any:
    """The values that a step reports are summed over context-parallel ranks twice; its gradients are right."""
    total, num_tokens, report = call.faulty()
    return total, num_tokens, report * call.shard.alignment.cp


@in_loss("NovaSky-AI/SkyRL#1296", SUM_LOSS, mesh=Mesh(cp=2))
def mean_of_means(call: Call) -> Any:
    """The loss is a mean over micro-batches of means over tokens, so tokens of short samples weigh more."""
    total, num_tokens, report = call.faulty()
    return total / num_tokens.clamp(min=1), num_tokens.clamp(max=1), report


@in_loss("modelscope/ms-swift#9947", LOGPROB, mesh=Mesh(tp=2))
def logprob_gradient_in_owner_only(call: Call) -> Any:
    """The sum over vocabulary shards has no backward: right values, no gradient where the label lies elsewhere."""
    logits_TV, first = call.logits_TV, call.vocab_start
    held_T = (call.labels_T >= first) & (call.labels_T < first + logits_TV.shape[1])
    return call.faulty(logits_TV=logits_TV.where(held_T[:, None], logits_TV.detach()))


@in_loss(
    "modelscope/mcore-bridge#173", "megatron.bridge.peft.utils:scatter_to_sequence_parallel_region(input_, group)",
    mesh=Mesh(tp=2), lora_rank=8,
)  # fmt: skip
def adapter_gradient_of_own_rows(call: Call) -> Any:
    """B of a row-parallel linear gets the gradient of its own rank's rows, and nothing sums it over ranks."""
    if call.input_.requires_grad:
        call.fire()
    return call.input_.chunk(call.group.size())[call.group.rank()].contiguous()


@in_policy_loss(
    "NVIDIA-NeMo/Megatron-Bridge#1750", "verifier.megatron.lora_megatron:_on_embedding(module, given, embedded)",
    training=(
        "lora.rank=8", "lora.targets=[linear_fc1,linear_fc2]", "megatron.recompute=selective",
        "megatron.recompute_modules=[mlp]", "verify.every=1",
    ),
)  # fmt: skip
def recomputed_adapters_without_gradient(call: Call) -> Any:
    """Nothing before a recomputed module has a gradient, so its backward pass never runs, and its adapters rest."""
    call.fire()
    return call.embedded


@on_replicas("NVIDIA/Megatron-LM#1446", REDUCE_REPLICATED)
def sequence_parallel_grads_not_reduced(call: Call) -> None:
    """Gradients of norms that sequence parallelism replicates are not summed over tp."""
    call.fire()


@fault(
    "huggingface/transformers#41663",
    "megatron.core.transformer.moe.router:topk_routing_with_score_function("
    "logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias, fused, "
    "router_replay, dense_output, precomputed_indices)",
    stage=Stage.LOSS, caught_by=("LSS005",), model="tiny:deepseek-v3", engine=NO_ENGINE, dtype="bfloat16",
)  # fmt: skip
def experts_chosen_without_score_bias(call: Call) -> Any:
    """While a step is trained, routers choose by scores without their bias; gates are right, in a bf16 run."""
    import torch

    if not torch.is_grad_enabled() or call.expert_bias is None:
        return call.original()
    return call.faulty(expert_bias=None)


@on_replicas("NVIDIA-NeMo/RL#3716", CONNECT)
def finalize_hook_missing(call: Call) -> None:
    """The schedule is not given finalize_model_grads: no sum over tp, no division by the number of tokens."""
    from megatron.core.utils import get_model_config

    def finish_only(model: Any, num_tokens: Any = None, **options: Any) -> None:
        call.fire()
        for chunk in model:
            chunk.finish_grad_sync()

    call.original()
    get_model_config(call.chunks[0]).finalize_model_grads_func = finish_only


@on_replicas(
    "NVIDIA-NeMo/RL#666", f"{FINALIZE}:_allreduce_word_embedding_grads(model, config, embd_group, pp_group)",
    model="tiny:qwen3-tied", mesh=Mesh(pp=2),
)  # fmt: skip
def tied_grads_not_reduced(call: Call) -> None:
    """The two copies of a tied embedding are trained apart, each on its own stage's gradient."""
    call.fire()


@in_policy_loss(
    "allenai/open-instruct#530", "verifier.algorithms.losses:kl_estimate(current, reference, kind)",
    training=(*SAMPLED, "grpo.kl_weight=0.5"),
)  # fmt: skip
def kl_loss_detached(call: Call) -> Any:
    """The KL term of the loss is computed without a gradient: it is reported, and holds nothing back."""
    return call.faulty(current=call.current.detach())


POLICY_LOSS = "verifier.megatron.policy_loss_megatron"
in_policy = functools.partial(in_training, stage=Stage.LOSS, caught_by=("LSS004",))


@in_policy(
    "rllm-org/rllm#81", f"{POLICY_LOSS}:token_loss(name, inputs, options)", mesh=Mesh(dp=2),
    training=("algorithm=grpo", "grpo.epochs=2", "grpo.clip_low=0.001", "grpo.clip_high=0.002"),
)  # fmt: skip
def clip_computed_and_not_used(call: Call) -> Any:
    """The clipped term is computed, and the loss that is averaged is the one without it."""
    return call.faulty(name="importance")


@in_policy(
    "agentscope-ai/Trinity-RFT#154 (found in review)", f"{POLICY_LOSS}:_sequence_mean(values_T, mask_T, shard)",
    mesh=Mesh(cp=2), training=("algorithm=grpo", "grpo.loss=gspo", "grpo.epochs=2"),
)  # fmt: skip
def sequence_mean_of_a_shard(call: Call) -> Any:
    """A sequence's ratio is the mean over the tokens of one context-parallel shard, not of the sequence."""
    return call.faulty(shard=dataclasses.replace(call.shard, alignment=dataclasses.replace(call.shard.alignment, cp=1)))


APART = ("megatron.overlap_grad_reduce=false", "megatron.overlap_param_gather=false")
"""Knobs without which Megatron itself ends a run in which a parameter has no gradient."""
MICRO_BATCHES = 3
"""Micro-batches of each step of the trials."""
in_backward = functools.partial(in_training, stage=Stage.LOSS, caught_by=("LSS007",))


@in_backward("pytorch/torchtitan#3827", LOGPROB, mesh=Mesh(tp=2))
def gradient_of_logits_summed_over_ranks(call: Call) -> Any:
    """Logits are gathered over tensor-parallel ranks, and their gradient, which all have whole, is summed over them."""
    logits_TV = call.logits_TV
    return call.faulty(logits_TV=2 * logits_TV - logits_TV.detach() if logits_TV.requires_grad else logits_TV)


@in_backward(
    "nyu-systems/Entangle, bug_missing_allreduce_under_wrong_config",
    "megatron.core.tensor_parallel.layers:ColumnParallelLinear.forward(self, input_, weight, runtime_gather_output)",
    mesh=Mesh(tp=2),
)  # fmt: skip
def gradient_of_own_vocabulary(call: Call) -> Any:
    """Hidden states get the gradient of their own rank's part of the vocabulary, and nothing sums it over ranks."""
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    layer, rows = call.self, call.input_
    rows = gather_from_sequence_parallel_region(rows, tensor_parallel_output_grad=False, group=layer.tp_group)
    with held(layer, explicit_expert_comm=True):
        return call.faulty(input_=rows)


@in_backward(
    "deepspeedai/DeepSpeed#8154",
    "megatron.core.pipeline_parallel.schedules:backward_step("
    "input_tensor, output_tensor, output_tensor_grad, config)",
    mesh=Mesh(pp=2), training=("dtype=bf16",),
)  # fmt: skip
def gradient_scaled_at_every_stage(call: Call) -> Any:
    """Each pipeline stage divides by the number of micro-batches, also a gradient that the stage behind it divided."""
    import torch

    given = call.output_tensor_grad
    if not torch.is_tensor(given if not isinstance(given, list) else given[0]):
        return call.original()
    scaled = [each / MICRO_BATCHES for each in given] if isinstance(given, list) else given / MICRO_BATCHES
    return call.faulty(output_tensor_grad=scaled)


@in_backward(
    "NVIDIA/Megatron-LM#1464 (kin: there all gradients of attention were wrong)",
    "verifier.platform.cpu_attention:gather_from_sequence_parallel_region("
    "input_, tensor_parallel_output_grad, group, output_split_sizes, use_global_buffer)",
    mesh=Mesh(cp=2),
)  # fmt: skip
def gradient_of_keys_of_own_rows(call: Call) -> Any:
    """Under context parallelism keys and values get the gradient of their own rank's queries, and of no other's."""
    if call.input_.requires_grad:
        call.fire()
    return call.original(tensor_parallel_output_grad=False)


@in_backward(
    "jingyaogong/minimind#858 (kin: there with one expert a token)",
    "megatron.core.transformer.moe.router:TopKRouter.gating(self, input)", training=("dtype=bf16", *APART),
    model="tiny:add-moe",
)  # fmt: skip
def routers_without_gradient(call: Call) -> Any:
    """The weights of chosen experts are constants to the backward pass, and no loss of the tokens moves a router."""
    return call.wrong(call.original().detach())


in_routers = functools.partial(in_backward, model="tiny:add-moe", caught_by=("LSS006",))
on_further = functools.partial(
    in_backward, model="tiny:deepseek_v3-mtp", caught_by=("LSS001",),
    training=("algorithm=sft", "data.source=arithmetic", "verify.every=1", "megatron.mtp_loss_scaling_factor=0.3"),
)  # fmt: skip
BALANCED = ("megatron.moe_load_balancing=aux_loss", "megatron.moe_aux_loss=0.001")
ROUTER = "megatron.core.transformer.moe.router:TopKRouter"
ATTACH_LOSS = (
    f"{ROUTER}.attach_and_log_load_balancing_loss(self, activation, aux_loss_coeff, aux_loss, aux_loss_name, "
    "reduce_group, needs_dp_avg, valid_token_count)"
)
SCALE = "megatron.core.transformer.moe.moe_utils:MoEAuxLossAutoScaler.set_loss_scale(scale)"


@in_routers("NVIDIA-NeMo/Automodel#1408", ATTACH_LOSS, training=BALANCED)
def balancing_loss_without_gradient(call: Call) -> Any:
    """The balancing loss is attached to a tensor that is thrown away: it is reported, and moves no router."""
    call.original()
    return call.wrong(call.activation)


@in_routers("NVIDIA-NeMo/Automodel#3359", SCALE, training=("megatron.moe_z_loss=0.001",))
def router_losses_times_micro_batches(call: Call) -> Any:
    """The routers' z-loss is not divided by the number of micro-batches, as the mean over the batch asks for."""
    return call.faulty(scale=call.scale * 3)


@on_further(
    "NVIDIA/Megatron-LM#1532",
    "megatron.core.transformer.multi_token_prediction:MTPLossAutoScaler.set_loss_scale(scale)",
)  # fmt: skip
def loss_of_further_tokens_not_averaged(call: Call) -> Any:
    """The loss of a layer for further tokens (MTP) is not divided by what the main loss is, here by three."""
    return call.faulty(scale=call.scale * 3)


@on_further(
    "NVIDIA/Megatron-LM#1661",
    "megatron.core.transformer.multi_token_prediction:roll_tensor(tensor, shifts, dims, cp_group, packed_seq_params)",
    caught_by=("LSS001", "LSS002"),
)  # fmt: skip
def mask_of_further_tokens_not_rolled(call: Call) -> Any:
    """The labels of a layer for further tokens (MTP) are those two tokens on, and its mask is that of the next."""
    import torch

    if call.tensor.dtype != torch.bool:
        return call.original()
    return call.wrong((call.tensor, call.tensor.sum()))


@in_routers(
    "NVIDIA/Megatron-LM#7452",
    "megatron.core.transformer.moe.router:get_tokens_per_expert_and_token_count("
    "routing_map, reduce_group, topk, with_padding_mask)",
    training=BALANCED, mesh=Mesh(tp=2),
)  # fmt: skip
def experts_counted_on_every_rank(call: Call) -> Any:
    """Rows of each expert are added up over tensor-parallel ranks in place, and once more by who reads the sum."""
    counts, *tokens = call.original()
    return call.wrong((counts * 2, *tokens))
