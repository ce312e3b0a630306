"""Bugs of optimizer steps: gradients, Adam, schedules, replicas."""

from __future__ import annotations

import functools
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Call, Side, fault, in_training, tensors_named
from verifier.mesh import Mesh

STEP = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads(self)"
CLIP = (
    "megatron.core.optimizer.optimizer:clip_grad_by_total_norm_fp32("
    "parameters, max_norm, total_norm, use_decoupled_grad)"
)
MAKE_MEGATRON_OPTIMIZER = (
    "megatron.core.optimizer:get_megatron_optimizer("
    "config, model_chunks, config_overrides, use_gloo_process_groups, pg_collection, dump_param_to_param_group_map)"
)
SCHEDULE = "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.step(self, increment)"
COPY_MASTERS = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer._copy_main_params_to_model_params(self)"
ZERO = "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.zero_grad_buffer(self)"
in_update = functools.partial(in_training, stage=Stage.TRAIN, caught_by=("TRN005",), training=("verify.every=0",))
"""Faults of updates that no oracle computes."""


@in_update("NVIDIA-NeMo/Automodel#576", CLIP, mesh=Mesh(tp=2))
def clip_not_applied(call: Call) -> None:
    """The norm of the gradient is computed and reported, and no gradient is scaled by it."""
    call.wrong(None)


@in_update("EleutherAI/DeeperSpeed#56", COPY_MASTERS, training=("verify.every=0", "dtype=bf16"))
def masters_not_copied(call: Call) -> Any:
    """The second step moves masters, which never come to the bf16 weights."""
    call.state["steps"] = call.state.get("steps", 0) + 1
    return call.wrong(None) if call.state["steps"] == 2 else call.original()


@in_update("NVIDIA-NeMo/RL#2371", MAKE_MEGATRON_OPTIMIZER, training=("verify.every=0", "dtype=bf16"))
def masters_of_weights_before_the_load(call: Call) -> Any:
    """The optimizer's masters have a fresh model's weights, and the first step writes these over the checkpoint's."""
    import torch

    from verifier.megatron.optimizer_megatron import master_of

    made = call.original()
    for part in made.chained_optimizers:
        for held in (item for group in part.optimizer.param_groups for item in group["params"]):
            call.fire()
            torch.nn.init.normal_(master_of(part.optimizer, held).data, std=0.02)
    return made


@in_update("NVIDIA-NeMo/RL#3171", STEP, mesh=Mesh(dp=2))
def moments_zeroed(call: Call) -> Any:
    """Adam's moments are zero before every step, and its count goes on."""
    for state in call.self.optimizer.state.values():
        call.fire()
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].zero_()
    return call.original()


@in_update("tenstorrent/tt-blacksmith#711", ZERO)
def gradients_never_zeroed(call: Call) -> Any:
    """Gradients are not zeroed after the first step, and every step has those of all before it."""
    call.state["calls"] = call.state.get("calls", 0) + 1
    if call.state["calls"] == 1:
        return call.original()
    call.fire()
    held = [buffer.grad_data.clone() for buffer in (*call.self.buffers, *call.self.expert_parallel_buffers)]
    call.original()
    for buffer, gradient in zip((*call.self.buffers, *call.self.expert_parallel_buffers), held, strict=True):
        buffer.grad_data.copy_(gradient)
    return None


@in_update("deepspeedai/DeepSpeed#7969", SCHEDULE, caught_by=("TRN002",))
def one_group_keeps_its_rate(call: Call) -> Any:
    """The schedule sets the rates of the first group alone; the others keep those of their start."""
    groups = call.self.optimizer.param_groups
    rates = [group["lr"] for group in groups]
    done = call.faulty()
    if "begun" in call.state:
        for group, rate in list(zip(groups, rates, strict=True))[1:]:
            group["lr"] = rate
    call.state["begun"] = True
    return done


ATTACH = "verifier.megatron.lora_megatron:attach(chunks, lora)"
FORWARD = (
    "verifier.megatron.step_megatron:_forward("
    "data_iterator, model, trainer, temperature, entropy, finish, read, further)"
)
SYNC = (
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_grad_sync(self, force_all_reduce)"
)
GATHER = (
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.finish_param_sync("
    "self, skip_next_bucket_dispatch)"
)
COUNTED = "megatron.core.tensor_parallel:param_is_not_tensor_parallel_duplicate(param, tp_group, expert_tp_group)"
in_sums = functools.partial(in_training, stage=Stage.TRAIN, caught_by=("TRN006",), training=("verify.every=0",))
"""Faults of what an optimizer is given, in updates that no oracle computes."""


@in_sums("huggingface/trl#3926", ATTACH, caught_by=("TRN005",), training=("verify.every=0", "lora.rank=8"))
def half_of_each_adapter_frozen(call: Call) -> Any:
    """A is frozen with the base, and B alone is trained."""
    chunks = call.original()
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if ".adapter.linear_in." in name:
                call.fire()
                parameter.requires_grad = False
    return chunks


@in_sums("verl-project/verl#7493", SYNC, mesh=Mesh(dp=2))
def gradient_of_one_rank(call: Call) -> Any:
    """The gradients of data-parallel ranks are not added up: all train on what the first one has seen."""
    import torch.distributed as dist

    if dist.get_rank() > 0:
        call.fire()
        for bucket in call.self.buckets:
            bucket.grad_data.zero_()
    return call.original()


@in_sums("pytorch/torchtitan#3575", FORWARD)
def gradient_of_the_last_micro_batch(call: Call) -> Any:
    """Gradients are zeroed before each micro-batch, not before each step, and the last one's alone are left."""
    if call.entropy:
        call.fire()
        for chunk in call.trainer.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.zero_()
    return call.original()


@in_sums("ROCm/TransformerEngine#715", COUNTED, mesh=Mesh(tp=2))
def norm_counts_copies_on_every_rank(call: Call) -> Any:
    """Replicated weights are marked as shards, and each tensor-parallel rank counts them in the gradient's norm."""
    return call.wrong(True)


@in_sums("NVIDIA/Megatron-LM#7160", SYNC, mesh=Mesh(ep=2, dp=2), model="tiny:add-moe")
def expert_gradients_scaled_once_more(call: Call) -> Any:
    """Gradients of experts carry a factor by which only those of the other weights are divided again."""
    for bucket in call.self.buckets:
        if not getattr(bucket.params_list[0], "allreduce", True):
            call.fire()
            bucket.grad_data.mul_(2)
    return call.original()


@in_sums("NVIDIA/Megatron-LM#950", GATHER, mesh=Mesh(dp=2), caught_by=("TRN005",))
def passes_before_the_gather(call: Call) -> Any:
    """A module of a training run computes before its weights are gathered, by those of the step before."""
    if not call.self.param_gather_dispatched:
        call.fire()
        call.self.param_gather_dispatched = True
    return call.original()


@in_sums(
    "pytorch/pytorch#84803",
    "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup.start_param_sync(self, force_sync)",
    mesh=Mesh(dp=2), caught_by=("WGT002", "TRN005"),
    training=("verify.every=0", "megatron.overlap_param_gather=false"),
)  # fmt: skip
def gather_lost_on_one_rank(call: Call) -> None:
    """Weights that a gather sends to one rank are lost: it keeps the other's shard of the step before."""
    group, before = call.self, [bucket.param_data.clone() for bucket in call.self.buckets]
    call.original()
    if group.intra_distributed_optimizer_instance_rank:
        call.fire()
        for bucket, kept in zip(group.buckets, before, strict=True):
            bucket.param_data[: len(kept) // 2] = kept[: len(kept) // 2]


@in_sums("NVIDIA/Megatron-LM#6624", SYNC, mesh=Mesh(dp=2), training=("verify.every=0", "dtype=bf16"))
def gradients_rounded_between_ranks(call: Call) -> Any:
    """The gradients of each rank pass through bf16 on their way to the sum of all, in float32 buffers."""
    for bucket in call.self.buckets:
        call.fire()
        bucket.grad_data.copy_(bucket.grad_data.bfloat16())
    return call.original()


@in_sums("NVIDIA/Megatron-LM#561", SYNC, mesh=Mesh(dp=2), training=("verify.every=0", "dtype=bf16"))
def last_element_of_each_bucket_lost(call: Call) -> Any:
    """Buckets are cut into equal shards without padding, and what is left at the end of each is in no shard's sum."""
    for bucket in call.self.buckets:
        call.fire()
        end = max(end for _, end in (bucket.param_to_index[item] for item in bucket.params_list))
        bucket.grad_data[end - 1 : end].zero_()
    return call.original()


MAKE_OPTIMIZER = "verifier.megatron.optimizer_megatron:make_optimizer(trainer, learning_rate, rule)"
SCORE = (
    "verifier.megatron.step_megatron:score("
    "trainer, rollouts, micro_batch_size, temperature, on_shards, on_rows, max_tokens, read)"
)
SCHEDULER = "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler"
LOAD_SCHEDULER = f"{SCHEDULER}.load_state_dict(self, state_dict)"
BIAS_UPDATE_RATE = 1e-3
"""Default of megatron-core."""
in_train = functools.partial(fault, stage=Stage.TRAIN, caught_by=("TRN001",))
on_rates = functools.partial(in_train, model="tiny:qwen3", engine=NO_ENGINE)


@in_train("ServiceNow/Fast-LLM#542", MAKE_MEGATRON_OPTIMIZER)
def norms_decay(call: Call) -> Any:
    """Custom rules replace the standard ones, and weight decay applies to norms and biases too."""
    return call.faulty(config_overrides={})


@in_train(
    "NovaSky-AI/SkyRL#1908", "verifier.model.provider_megatron:_configure(provider, mesh, dtype, tier)",
    caught_by=("WGT010",), model="tiny:deepseek-v3",
)  # fmt: skip
def score_bias_balanced(call: Call) -> None:
    """Every step moves the routers' score bias towards balanced experts, with a policy loss too."""
    call.faulty()
    call.provider.moe_router_bias_update_rate = BIAS_UPDATE_RATE


@in_train("NVIDIA-NeMo/RL#1012", SCORE, caught_by=("WGT010",))
def step_in_evaluation(call: Call) -> Any:
    """The optimizer steps after an evaluation too, with the gradients that the last step left."""
    scored = call.original()
    if "optimizer" in call.state:
        call.fire()
        call.state["optimizer"].step()
    return scored


@step_in_evaluation.also(MAKE_OPTIMIZER)
def _remember(call: Call) -> Any:
    call.state["optimizer"] = call.original()
    return call.state["optimizer"]


@in_train("verl-project/verl#2377", STEP, caught_by=("WGT008", "TRN001"))
def step_dropped(call: Call) -> Any:
    """Steps are dropped, as for a gradient that is not finite, and reported as done."""
    return call.wrong(True)


@in_train("NovaSky-AI/SkyRL#1403", STEP)
def adam_step_stale(call: Call) -> Any:
    """Saving and loading the optimizer loses Adam's count of steps: its moments' bias is corrected anew."""
    resumed, states = call.state.setdefault("resumed", []), call.self.optimizer.state
    if states and call.self not in resumed:
        call.fire()
        resumed.append(call.self)
        for state in states.values():
            state["step"].zero_()
    return call.original()


@in_train("THUDM/slime#1775", LOAD_SCHEDULER)
def scheduler_resumed_twice(call: Call) -> None:
    """A run that resumes advances its scheduler by hand, and once more by what was saved of it."""
    call.faulty(state_dict={**call.state_dict, "num_steps": 2 * call.state_dict["num_steps"]})


@on_rates("NVIDIA/Megatron-LM#7468", LOAD_SCHEDULER)
def decay_stale_after_resume(call: Call) -> None:
    """A run resumes with a weight decay 4% lower in its arguments, and its first step takes it, not the saved one."""
    call.self.start_wd, call.self.end_wd = 0.96 * call.self.start_wd, 0.96 * call.self.end_wd
    call.faulty()


@on_rates(
    "NVIDIA/Megatron-LM#4705",
    "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.load_state_dict(self, state_dict)",
)
def groups_of_parameters_collide(call: Call) -> None:
    """A load knows a group of parameters without its rates, so that one takes those of another, as up to 0.18.2."""
    from megatron.core.optimizer import distrib_optimizer

    known = distrib_optimizer.param_group_identifier_keys
    distrib_optimizer.param_group_identifier_keys = ("wd_mult", "lr_mult", "is_expert_parallel", "is_decoupled_lr")
    try:
        call.faulty()
    finally:
        distrib_optimizer.param_group_identifier_keys = known


@on_rates("vllm-project/speculators#765", f"{SCHEDULER}.get_lr(self, param_group)", dtype="bfloat16", cycles=3)
def norms_never_move(call: Call) -> Any:
    """Norms stay as they are, as where each step rounds away: in bf16 two steps of 1e-3 show nothing, a third does."""
    return call.original() if call.param_group.get("wd_mult", 1.0) else call.wrong(0.0)


@on_rates("DingfanChen/GS-WGAN#5", CLIP)
def short_gradients_lengthened(call: Call) -> None:
    """The factor that clips is not capped at 1: gradients shorter than the clip are made as long as it."""
    if call.total_norm < call.max_norm:
        call.fire()
        for parameter in call.parameters:
            parameter.grad.mul_(call.max_norm / call.total_norm)
    else:
        call.original()


@in_train("NVIDIA/Megatron-LM#5916", COUNTED, mesh=Mesh(tp=2, ep=2))
def experts_outside_gradient_norm(call: Call) -> Any:
    """Experts of all tp ranks but the first are left out of the norm by which gradients are clipped."""
    counted = call.original()
    lost = counted and not getattr(call.param, "allreduce", True) and call.tp_group.rank() > 0
    return call.wrong(False) if lost else counted


@in_train(
    "pytorch/torchtitan#3438", "megatron.bridge.peft.base:PEFT.freeze_model(self, model, training)",
    caught_by=("WGT010", "WGT004"), model="tiny:qwen3", engine="vllm", lora_rank=8,
)  # fmt: skip
def norm_trained_beside_adapter(call: Call) -> Any:
    """A norm of the frozen base is left trainable, and no sync of the adapter brings it to the engine."""
    frozen = call.original()
    for norm in tensors_named(call.model, "layers.2.self_attention.q_layernorm.weight"):
        norm.requires_grad = True
        call.fire()
    return frozen


BALANCED = "megatron.moe_bias_update_rate=0.001"
UPDATED_BIAS = (
    "megatron.core.distributed.finalize_model_grads:get_updated_expert_bias("
    "tokens_per_expert, expert_bias, expert_bias_update_rate, tp_dp_cp_group)"
)
on_balance = functools.partial(in_training, stage=Stage.TRAIN, model="tiny:add-deepseek", mesh=Mesh(dp=2, ep=2))
"""Faults of the routers' score biases, whose runs move them."""


@in_training("verl-project/verl#2377", STEP, stage=Stage.TRAIN, caught_by=("TRN003",))
def step_skipped_in_silence(call: Call) -> Any:
    """The optimizer skips a step, as for a gradient that is not finite, and the run counts it."""
    return call.wrong(True)


@on_balance(
    "pytorch/torchtitan#4148",
    "megatron.core.transformer.moe.router:TopKRouter._apply_expert_bias(self, routing_map, padding_mask)",
    training=(BALANCED, "evaluation.every=1", "evaluation.num_problems=16"), caught_by=("TRN004",),
)  # fmt: skip
def evaluation_counts_tokens(call: Call) -> None:
    """Routers count the tokens of an evaluation too, and the next step moves the score bias by them."""
    import torch

    if not torch.is_grad_enabled():
        call.fire()
    with torch.enable_grad():
        call.original()


@on_balance("pytorch/torchtitan#3386", UPDATED_BIAS, training=(BALANCED,), caught_by=("TRN004", "WGT002"))
def counts_of_one_rank(call: Call) -> Any:
    """Each data-parallel rank moves its score biases by the tokens of its own micro-batches, and the copies part."""
    from megatron.core import parallel_state

    return call.faulty(tp_dp_cp_group=parallel_state.get_tensor_model_parallel_group())


@on_balance(
    "radixark/miles#811 (kin: there the engine alone was sent what was rounded)",
    "verifier.trainer.worker_megatron:TrainerWorker.evaluate(self, batch)", caught_by=("TRN004",),
    training=(BALANCED, "verify.every=0", "evaluation.every=1", "evaluation.num_problems=8"),
)  # fmt: skip
def score_bias_rounded_between_steps(call: Call) -> Any:
    """Score biases pass through the weights' bf16 with all buffers, between two steps, and stay rounded."""
    found = call.original()
    for chunk in call.self._trainer.chunks:
        for name, bias in chunk.named_buffers():
            if name.endswith(".expert_bias"):
                call.fire()
                bias.copy_(bias.bfloat16())
    return found


@in_training(
    "areal-project/AReaL#312",
    "megatron.core.optimizer.optimizer:get_grad_norm_fp32(grads_for_norm, norm_type, grad_stats_parallel_group)",
    stage=Stage.TRAIN, mesh=Mesh(dp=2), caught_by=("TRN003",),
)  # fmt: skip
def norm_of_one_rank(call: Call) -> Any:
    """The norm by which gradients are clipped is that of a rank's own shard, so ranks clip by different factors."""
    from megatron.core import parallel_state

    return call.faulty(grad_stats_parallel_group=parallel_state.get_tensor_model_parallel_group())


@in_training(
    "NovaSky-AI/SkyRL#873", "verifier.trainer.ranks:optimizer_settings(config)",
    "verifier.probes.training.run_evidence:optimizer_settings(config)", stage=Stage.TRAIN, side=Side.CONTROLLER,
    caught_by=("TRN002",), training=("algorithm=grpo", "grpo.mini_batches=2", "grpo.epochs=2", "verify.every=0"),
)  # fmt: skip
def schedule_ends_with_the_batches(call: Call) -> Any:
    """The schedule's end is the number of batches, and it counts updates: rates are at their least after a quarter."""
    config = call.config
    return call.wrong({**call.original(), "decay_steps": max(config.steps, config.optimizer.warmup_steps + 1)})


@in_training(
    "pytorch/torchtitan#2416", "verifier.model.provider_megatron:_connect(chunks, data_parallel)", stage=Stage.TRAIN,
    model="tiny:add-moe", mesh=Mesh(tp=2), training=("verify.every=1", "dtype=bf16"), caught_by=("WGT002", "LSS001"),
)  # fmt: skip
def router_gradient_of_own_rows(call: Call) -> None:
    """A router's gradient lacks the other tp rank's tokens; in training in bf16, whose routers flip.

    The gradient of the first step is within what bf16 leaves; the two copies that it moves differ.
    """
    for weight in tensors_named(call.chunks, "layers.1.mlp.router.weight"):
        call.fire()
        weight.sequence_parallel = False
    call.original()
