"""Bugs of the training step: masters, moments, replicas, norms, and steps at the wrong time or not at all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, TRAINING, Call, Side, fault, kind, tensors_named
from verifier.mesh import Mesh

MAKE_MEGATRON_OPTIMIZER = (
    "megatron.core.optimizer:get_megatron_optimizer("
    "config, model_chunks, config_overrides, use_gloo_process_groups, pg_collection, dump_param_to_param_group_map)"
)
MAKE_OPTIMIZER = "verifier.train.optimizer_megatron:make_optimizer(trainer, learning_rate, rule)"
SCORE = (
    "verifier.train.step_megatron:score("
    "trainer, rollouts, micro_batch_size, temperature, on_shards, on_rows, max_tokens, read)"
)
STEP = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads(self)"
SCHEDULER = "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler"
LOAD_SCHEDULER = f"{SCHEDULER}.load_state_dict(self, state_dict)"
BIAS_UPDATE_RATE = 1e-3
"""Default of megatron-core."""
in_train = functools.partial(fault, stage=Stage.TRAIN, caught_by=("TRN001",))
on_rates = functools.partial(in_train, model="tiny:qwen3", engine=NO_ENGINE)
on_frozen = functools.partial(in_train, caught_by=("WGT007",), model="tiny:deepseek-v3")
"""Faults that move what the step must leave as it is."""


@kind(STEP, stage=Stage.TRAIN, caught_by=("TRN001",))
def on_resume(spoil: Callable[[dict[str, Any]], object], call: Call) -> Any:
    """Save and load the optimizer after its first step: the function spoils the state of one parameter."""
    resumed, states = call.state.setdefault("resumed", []), call.self.optimizer.state
    if states and call.self not in resumed:
        call.fire()
        resumed.append(call.self)
        for state in states.values():
            spoil(state)
    return call.original()


@in_train("ServiceNow/Fast-LLM#542", MAKE_MEGATRON_OPTIMIZER)
def norms_decay(call: Call) -> Any:
    """Custom rules replace the standard ones, and weight decay applies to norms and biases too."""
    return call.faulty(config_overrides={})


@on_frozen("NovaSky-AI/SkyRL#1908", "verifier.model.provider_megatron:_configure(provider, mesh, dtype, tier)")
def score_bias_balanced(call: Call) -> None:
    """Every step moves the routers' score bias towards balanced experts, with a policy loss too."""
    call.faulty()
    call.provider.moe_router_bias_update_rate = BIAS_UPDATE_RATE


@on_frozen("NovaSky-AI/SkyRL#2149", MAKE_OPTIMIZER, dtype="bfloat16")
def masters_stale_after_load(call: Call) -> Any:
    """Weights are loaded after the optimizer took its fp32 masters, which are not refreshed."""
    import torch

    parameters = [parameter for chunk in call.trainer.chunks for parameter in chunk.parameters()]
    loaded = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.875)
        optimizer = call.faulty()
        for parameter, weight in zip(parameters, loaded, strict=True):
            parameter.copy_(weight)
    return optimizer


@in_train("NVIDIA-NeMo/RL#1012", SCORE, caught_by=("WGT009",))
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


@on_resume("NovaSky-AI/SkyRL#1403")
def adam_step_stale(state: dict[str, Any]) -> None:
    """Saving and loading the optimizer loses Adam's count of steps: its moments' bias is corrected anew."""
    state["step"].zero_()


@on_resume("NVIDIA-NeMo/RL#3171")
def moments_not_restored(state: dict[str, Any]) -> None:
    """A run resumes from its weights alone, and Adam's moments begin again at zero."""
    for value in state.values():
        value.zero_()


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


@on_rates("areal-project/AReaL#1289", "verifier.train.optimizer_megatron:make_scheduler(optimizer, rule)", cycles=3)
def warm_up_subtracted_twice(call: Call) -> Any:
    """The end of the decay is given without the warm-up, which the scheduler subtracts too: rates fall too fast."""
    scheduler = call.faulty()
    scheduler.lr_decay_steps -= scheduler.lr_warmup_steps
    return scheduler


@on_rates("deepspeedai/DeepSpeed#7713", f"{SCHEDULER}.get_lr(self, param_group)")
def group_rates_overwritten(call: Call) -> Any:
    """The scheduler gives all groups of parameters its own rate, also those that have one of their own."""
    return call.faulty(param_group={})


@on_rates("vllm-project/speculators#765", f"{SCHEDULER}.get_lr(self, param_group)", dtype="bfloat16", cycles=3)
def norms_never_move(call: Call) -> Any:
    """Norms stay as they are, as where each step rounds away: in bf16 two steps of 1e-3 show nothing, a third does."""
    return call.original() if call.param_group.get("wd_mult", 1.0) else call.wrong(0.0)


@on_rates(
    "DingfanChen/GS-WGAN#5",
    "megatron.core.optimizer.optimizer:"
    "clip_grad_by_total_norm_fp32(parameters, max_norm, total_norm, use_decoupled_grad)",
)
def short_gradients_lengthened(call: Call) -> None:
    """The factor that clips is not capped at 1: gradients shorter than the clip are made as long as it."""
    if call.total_norm < call.max_norm:
        call.fire()
        for parameter in call.parameters:
            parameter.grad.mul_(call.max_norm / call.total_norm)
    else:
        call.original()


@in_train(
    "NVIDIA/Megatron-LM#5916",
    "megatron.core.tensor_parallel:param_is_not_tensor_parallel_duplicate(param, tp_group, expert_tp_group)",
    mesh=Mesh(tp=2, ep=2),
)
def experts_outside_gradient_norm(call: Call) -> Any:
    """Experts of all tp ranks but the first are left out of the norm by which gradients are clipped."""
    counted = call.original()
    lost = counted and not getattr(call.param, "allreduce", True) and call.tp_group.rank() > 0
    return call.wrong(False) if lost else counted


@in_train(
    "pytorch/torchtitan#3438", "megatron.bridge.peft.base:PEFT.freeze_model(self, model, training)",
    caught_by=("WGT012", "WGT004"), model="tiny:qwen3", engine="vllm", lora_rank=8,
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
on_balance = functools.partial(
    fault, stage=Stage.TRAIN, engine=TRAINING, model="tiny:add-deepseek", mesh=Mesh(dp=2, ep=2),
)  # fmt: skip
"""Faults of the routers' score biases, whose runs move them."""


@fault(
    "verl-project/verl#2377", STEP, stage=Stage.TRAIN, engine=TRAINING, model="tiny:add", caught_by=("TRN003",),
)  # fmt: skip
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


@on_balance("pytorch/torchtitan#3686", UPDATED_BIAS, training=(BALANCED,), caught_by=("TRN004",))
def later_biases_left(call: Call) -> Any:
    """The update of the score biases ends early, and no layer behind the first mixture has its bias moved."""
    moved = call.faulty()
    moved[1:] = call.expert_bias[1:]
    return moved


@on_balance("NVIDIA/Megatron-LM#1482", UPDATED_BIAS, training=(BALANCED,), caught_by=("TRN004",))
def score_bias_in_bf16(call: Call) -> Any:
    """The score bias is bf16 where it is updated, so that a small rate rounds to none or to another."""
    return call.faulty().bfloat16()


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


@fault(
    "areal-project/AReaL#312",
    "megatron.core.optimizer.optimizer:get_grad_norm_fp32(grads_for_norm, norm_type, grad_stats_parallel_group)",
    stage=Stage.TRAIN, engine=TRAINING, model="tiny:add", mesh=Mesh(dp=2), caught_by=("TRN003",),
)  # fmt: skip
def norm_of_one_rank(call: Call) -> Any:
    """The norm by which gradients are clipped is that of a rank's own shard, so ranks clip by different factors."""
    from megatron.core import parallel_state

    return call.faulty(grad_stats_parallel_group=parallel_state.get_tensor_model_parallel_group())


@fault(
    "NovaSky-AI/SkyRL#873", "verifier.trainer.ranks:optimizer_settings(config)",
    "verifier.probes.training.run_evidence:optimizer_settings(config)", stage=Stage.TRAIN, side=Side.CONTROLLER,
    engine=TRAINING, model="tiny:add", caught_by=("TRN002",),
    training=("algorithm=grpo", "grpo.mini_batches=2", "grpo.epochs=2", "verify.every=0"),
)  # fmt: skip
def schedule_ends_with_the_batches(call: Call) -> Any:
    """The schedule's end is the number of batches, and it counts updates: rates are at their least after a quarter."""
    config = call.config
    return call.wrong({**call.original(), "decay_steps": max(config.steps, config.optimizer.warmup_steps + 1)})
