"""Bugs of the training step: masters, moments, replicas, norms, and steps at the wrong time or not at all."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, FireCounter, fault
from verifier.mesh import Mesh

MAKE_OPTIMIZER = "verifier.train.optimizer_megatron:make_optimizer(trainer, learning_rate, clip_grad)"
SCORE = "verifier.train.step_megatron:score(trainer, rollouts, micro_batch_size, temperature, on_shards)"
STEP = "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer.step_with_ready_grads(self)"
LOAD_SCHEDULER = "megatron.core.optimizer_param_scheduler:OptimizerParamScheduler.load_state_dict(self, state_dict)"
BIAS_UPDATE_RATE = 1e-3
"""Default of megatron-core."""
ROW: dict[str, Any] = {"stage": Stage.TRAIN, "caught_by": ("TRN001",)}
FROZEN: dict[str, Any] = {"stage": Stage.TRAIN, "caught_by": ("WGT007",), "model": "tiny:deepseek-v3"}
"""Faults that move what the step must leave as it is."""


def on_resume(**row: Any) -> Callable[[Callable[[dict[str, Any]], object]], Fault]:
    """Register a fault of an optimizer that was saved and loaded after its first step.

    The function spoils the state of one parameter.
    """

    def register(spoil: Callable[[dict[str, Any]], object]) -> Fault:
        @functools.wraps(spoil)
        def step(original: Any, fire: FireCounter, self: Any) -> Any:
            resumed = fire.state.setdefault("resumed", [])
            if self.optimizer.state and self not in resumed:
                fire()
                resumed.append(self)
                for state in self.optimizer.state.values():
                    spoil(state)
            return original(self)

        return fault(STEP, **ROW, **row)(step)

    return register


@fault(
    "megatron.core.optimizer:get_megatron_optimizer("
    "config, model_chunks, config_overrides, use_gloo_process_groups, pg_collection, dump_param_to_param_group_map)",
    id="norms-decay", reproduces="ServiceNow/Fast-LLM#542", **ROW,
)  # fmt: skip
def norms_decay(original: Any, fire: FireCounter, *args: Any, **options: Any) -> Any:
    """Custom rules replace the standard ones, and weight decay applies to norms and biases too."""
    fire()
    return original(*args, **{**options, "config_overrides": {}})


@fault(
    STEP, id="masters-rebuilt-from-model", reproduces="NVIDIA/Megatron-LM#2789", model="tiny:qwen3", dtype="bfloat16",
    **ROW,
)  # fmt: skip
def masters_rebuilt_from_model(original: Any, fire: FireCounter, self: Any) -> Any:
    """The fp32 masters are rebuilt from the bf16 model before the second step, and lose their low bits."""
    if self.optimizer.state:
        fire()
        self.reload_model_params()
    return original(self)


@fault(
    "verifier.model.provider_megatron:_configure(provider, mesh, dtype, tier)",
    id="score-bias-balanced", reproduces="NovaSky-AI/SkyRL#1908", **FROZEN,
)  # fmt: skip
def score_bias_balanced(original: Any, fire: FireCounter, provider: Any, *args: Any) -> None:
    """Every step moves the routers' score bias towards balanced experts, with a policy loss too."""
    fire()
    original(provider, *args)
    provider.moe_router_bias_update_rate = BIAS_UPDATE_RATE


@fault(MAKE_OPTIMIZER, id="masters-stale-after-load", reproduces="NovaSky-AI/SkyRL#2149", dtype="bfloat16", **FROZEN)
def masters_stale_after_load(original: Any, fire: FireCounter, trainer: Any, **options: Any) -> Any:
    """Weights are loaded after the optimizer took its fp32 masters, which are not refreshed."""
    import torch

    fire()
    parameters = [parameter for chunk in trainer.chunks for parameter in chunk.parameters()]
    loaded = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.mul_(0.875)
        optimizer = original(trainer, **options)
        for parameter, weight in zip(parameters, loaded, strict=True):
            parameter.copy_(weight)
    return optimizer


@fault(SCORE, id="step-in-evaluation", stage=Stage.TRAIN, reproduces="NVIDIA-NeMo/RL#1012", caught_by=("WGT009",))
def step_in_evaluation(original: Any, fire: FireCounter, *args: Any, **options: Any) -> Any:
    """The optimizer steps after an evaluation too, with the gradients that the last step left."""
    scored = original(*args, **options)
    if "optimizer" in fire.state:
        fire()
        fire.state["optimizer"].step()
    return scored


@step_in_evaluation.also(MAKE_OPTIMIZER)
def _remember(original: Any, fire: FireCounter, trainer: Any, **options: Any) -> Any:
    fire.state["optimizer"] = original(trainer, **options)
    return fire.state["optimizer"]


@fault(STEP, id="step-dropped", stage=Stage.TRAIN, reproduces="verl-project/verl#2377", caught_by=("WGT008", "TRN001"))
def step_dropped(original: Any, fire: FireCounter, self: Any) -> bool:
    """Steps are dropped, as for a gradient that is not finite, and reported as done."""
    fire()
    return True


@on_resume(id="adam-step-stale", reproduces="NovaSky-AI/SkyRL#1403")
def adam_step_stale(state: dict[str, Any]) -> None:
    """Saving and loading the optimizer loses Adam's count of steps: its moments' bias is corrected anew."""
    state["step"].zero_()


@on_resume(id="moments-not-restored", reproduces="NVIDIA-NeMo/RL#3171")
def moments_not_restored(state: dict[str, Any]) -> None:
    """A run resumes from its weights alone, and Adam's moments begin again at zero."""
    for value in state.values():
        value.zero_()


@fault(LOAD_SCHEDULER, id="scheduler-not-resumed", reproduces="THUDM/slime#1152", **ROW)
def scheduler_not_resumed(original: Any, fire: FireCounter, self: Any, state_dict: dict[str, Any]) -> None:
    """A run that resumes does not advance its scheduler: rates begin again at those of the first step."""
    fire()
    original(self, {**state_dict, "num_steps": 0})


@fault(LOAD_SCHEDULER, id="scheduler-resumed-twice", reproduces="THUDM/slime#1775", **ROW)
def scheduler_resumed_twice(original: Any, fire: FireCounter, self: Any, state_dict: dict[str, Any]) -> None:
    """A run that resumes advances its scheduler by hand, and once more by what was saved of it."""
    fire()
    original(self, {**state_dict, "num_steps": 2 * state_dict["num_steps"]})


@fault(
    "megatron.core.tensor_parallel:param_is_not_tensor_parallel_duplicate(param, tp_group, expert_tp_group)",
    id="experts-outside-gradient-norm", reproduces="NVIDIA/Megatron-LM#5916", mesh=Mesh(tp=2, ep=2), **ROW,
)  # fmt: skip
def experts_outside_gradient_norm(
    original: Any, fire: FireCounter, param: Any, tp_group: Any = None, expert_tp_group: Any = None
) -> bool:
    """Experts of all tp ranks but the first are left out of the norm by which gradients are clipped."""
    counted: bool = original(param, tp_group, expert_tp_group)
    if counted and not getattr(param, "allreduce", True) and tp_group.rank() > 0:
        fire()
        return False
    return counted


@fault(
    "megatron.bridge.peft.base:PEFT.freeze_model(self, model, training)",
    id="norm-trained-beside-adapter", stage=Stage.TRAIN, reproduces="pytorch/torchtitan#3438",
    caught_by=("WGT012", "WGT004"), model="tiny:qwen3", engine="vllm", lora_rank=8,
)  # fmt: skip
def norm_trained_beside_adapter(original: Any, fire: FireCounter, self: Any, model: Any, training: bool = True) -> Any:
    """A norm of the frozen base is left trainable, and no sync of the adapter brings it to the engine."""
    frozen = original(self, model, training)
    for chunk in model:
        for name, parameter in chunk.named_parameters():
            if name.endswith("layers.2.self_attention.q_layernorm.weight"):
                parameter.requires_grad = True
                fire()
    return frozen
