"""Bugs of the optimizer's step in a training run whose steps no oracle computes: clip, masters, groups, gradients."""

from __future__ import annotations

import functools
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, fault
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
in_update = functools.partial(
    fault, stage=Stage.TRAIN, engine=TRAINING, model="tiny:add", caught_by=("TRN005",), training=("verify.every=0",)
)
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

    from verifier.train.optimizer_megatron import master_of

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


@in_update("databricks/flashoptim#2", STEP, mesh=Mesh(dp=2), training=("verify.every=1", "dtype=bf16"))
def moments_stored_through_bf16(call: Call) -> Any:
    """The step writes its moments through bf16, the weights' type, into the float32 memory that holds them."""
    done = call.faulty()
    for state in call.self.optimizer.state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            state[name].copy_(state[name].bfloat16())
    return done


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


@in_update("pytorch/torchtitan#4382 (kin: there the optimizer also counted a step)", MAKE_MEGATRON_OPTIMIZER)
def moments_of_a_step_before_the_first(call: Call) -> Any:
    """Adam's state is made by a step on nothing but weight decay, and its moments stay for the first update."""
    import torch

    found = call.original()
    for part in found.chained_optimizers:
        for group in part.optimizer.param_groups:
            for master in group["params"]:
                given = 0.1 * master.detach()
                moments = {"exp_avg": 0.1 * given, "exp_avg_sq": 0.05 * given.square()}
                part.optimizer.state[master] = {"step": torch.tensor(0.0), **moments}
                call.fire()
    return found
