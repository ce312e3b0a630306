"""Megatron's optimizer and scheduler: construction, reduced gradients, and state."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from verifier.config.training import OptimizerOptions
from verifier.errors import ContractError
from verifier.launch.child import give_memory_back
from verifier.megatron import fsdp_megatron
from verifier.model.provider_megatron import DataParallel, TrainerModel
from verifier.platform.upstream_fixes import MEGATRON_INDEX
from verifier.platform.upstream_fixes_megatron import index_states


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSettings(OptimizerOptions):
    """Adam's settings and the schedule of its rates, by the number of the step from 1 on."""

    decay_steps: int = 1
    """Step at which the rate is the least."""


class RolloutRule(Protocol):
    """Adam's settings and the schedule of its rates, by the number of rollouts that earlier steps have trained on."""

    first_learning_rate: float
    """Learning rate at none."""
    learning_rate: float
    """Learning rate at `warm_up` rollouts: a straight line leads there."""
    least_learning_rate: float
    """Learning rate from `num_rollouts` on: half a cosine leads there."""
    embedding_learning_rate: float
    """The embedding's and the output's at `warm_up` rollouts; they begin as all others do."""
    least_embedding_learning_rate: float
    warm_up: int
    num_rollouts: int
    weight_decay: float
    """Weight decay of matrices at no rollouts; vectors do not decay."""
    greatest_weight_decay: float
    """Weight decay of matrices from `num_rollouts` on: a straight line leads there, from the first rollout."""
    clip_grad: float
    beta_1: float
    beta_2: float
    epsilon: float


def make_optimizer(
    trainer: TrainerModel, *, learning_rate: float = 0.0, rule: RolloutRule | StepSettings | None = None
) -> Any:
    """Build Megatron's Adam over this rank's parameters; weight decay is 0 unless a scheduler sets it.

    The rule has rates of each group of parameters, for a scheduler, and what clips, by default a norm of 1; without one
    steps that have no rate of their own have `learning_rate`.

    Raises:
        ContractError: the trainer was built for forward passes only.
    """
    options = _trained(trainer)
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.utils import get_model_config

    fields: dict[str, Any] = {"lr": learning_rate, "adam_beta1": 0.9, "adam_beta2": 0.95}
    if rule is not None:
        fields |= {
            "lr": rule.learning_rate, "min_lr": rule.least_learning_rate, "clip_grad": rule.clip_grad,
            "adam_beta1": rule.beta_1, "adam_beta2": rule.beta_2, "adam_eps": rule.epsilon,
        }  # fmt: skip
    if rule is not None and not isinstance(rule, StepSettings):
        fields |= {
            "decoupled_lr": rule.embedding_learning_rate, "decoupled_min_lr": rule.least_embedding_learning_rate,
        }  # fmt: skip
    config = OptimizerConfig(
        **fields,
        optimizer="adam",
        weight_decay=0.0,
        bf16=trainer.provider.bf16,
        params_dtype=torch.bfloat16 if trainer.provider.bf16 else torch.float32,
        use_distributed_optimizer=options.distributed_optimizer,
        overlap_param_gather=options.overlap_param_gather,
        # Masters and moments on the host come with the optimizer that is told where each of them is.
        optimizer_cpu_offload=options.offload > 0,
        use_precision_aware_optimizer=options.offload > 0,
        optimizer_offload_fraction=options.offload,
        overlap_cpu_optimizer_d2h_h2d=options.overlap_offload,
    )
    optimizer = get_megatron_optimizer(config, trainer.chunks, use_gloo_process_groups=False)
    if options.fsdp is not None:
        optimizer = fsdp_megatron.chained(optimizer)
    elif options.distributed_optimizer and MEGATRON_INDEX in trainer.fixes:
        index_states(optimizer)
    get_model_config(trainer.chunks[0]).grad_scale_func = optimizer.scale_loss
    return optimizer


def forget_optimizer(trainer: TrainerModel) -> None:
    """Let the last optimizer go, which is several times as large as the model: the model's config refers to it."""
    from megatron.core.utils import get_model_config

    get_model_config(trainer.chunks[0]).grad_scale_func = None
    give_memory_back()


def make_scheduler(optimizer: Any, rule: RolloutRule) -> Any:
    """Build Megatron's scheduler, which counts rollouts; `optimizer`, of that rule too, gets the first step's rates."""
    return _scheduler(
        optimizer, rule, init_lr=rule.first_learning_rate, lr_warmup_steps=rule.warm_up,
        lr_decay_steps=rule.num_rollouts, lr_decay_style="cosine", start_wd=rule.weight_decay,
        end_wd=rule.greatest_weight_decay, wd_incr_steps=rule.num_rollouts, wd_incr_style="linear",
    )  # fmt: skip


def make_step_scheduler(optimizer: Any, settings: StepSettings) -> Any:
    """Build Megatron's scheduler, which counts steps; `optimizer`, of these settings too, gets the first step's rates.

    Megatron's first step has count 0, and with a warm-up a rate of 0; here it has count 1.
    """
    scheduler = _scheduler(
        optimizer, settings, init_lr=0.0, lr_warmup_steps=settings.warmup_steps, lr_decay_steps=settings.decay_steps,
        lr_decay_style=settings.schedule, start_wd=settings.weight_decay, end_wd=settings.weight_decay,
        wd_incr_steps=settings.decay_steps, wd_incr_style="constant",
    )  # fmt: skip
    scheduler.step(1)
    return scheduler


def _scheduler(optimizer: Any, rule: RolloutRule | StepSettings, **options: Any) -> Any:
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(optimizer, max_lr=rule.learning_rate, min_lr=rule.least_learning_rate, **options)


def steps_of(optimizer: Any) -> int:
    """Number of steps that Adam has taken, by its own count; 0 before the first.

    Transformer Engine's Adam counts in each group of parameters, and torch's for each parameter.
    """
    counts = [0]
    for part in optimizer.chained_optimizers:
        counts += [int(group["step"]) for group in part.optimizer.param_groups if "step" in group]
        counts += [int(state["step"]) for state in part.optimizer.state.values() if "step" in state]
    return max(counts)


def named_gradients(trainer: TrainerModel) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Copy the reduced gradients, between backward pass and step; a distributed optimizer's are gathered. A collective.

    Every rank draws all of them before the step, and calls no other collective in between.

    Yields:
        (model chunk, local parameter name without wrappers, float32 tensor of the parameter's shape).

    Raises:
        ContractError: the trainer was built for forward passes only.

    Source:
        megatron-core 0.19.2, core/distributed/param_and_grad_buffer.py: a bucket's gradient is reduce-scattered over
        the buffer's data-parallel group in equal consecutive shards (`shard_buffer`), rank by rank.
    """
    sharded = _trained(trainer).distributed_optimizer
    if _trained(trainer).fsdp is not None:
        yield from fsdp_megatron.named_gradients(trainer)
        return
    for at, chunk in enumerate(trainer.chunks):
        names = {parameter: name.replace("module.", "") for name, parameter in chunk.named_parameters()}
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for number, bucket in enumerate(buffer.buckets):
                whole = _gathered(buffer, bucket) if sharded else bucket.grad_data
                for parameter, (begin, end, own) in buffer.param_index_map.items():
                    if own == number:
                        values = whole[begin - bucket.offset : end - bucket.offset]
                        yield at, names[parameter], values.view(parameter.shape).clone()


def owned_gradients(trainer: TrainerModel) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Views of the reduced gradients that this rank owns, between backward pass and step; nothing is gathered.

    Yields:
        (model chunk, local parameter name without wrappers, flat view of the part that this rank's optimizer reads: all
        of it, or the rank's share under a distributed optimizer); nothing for a parameter without a part here.

    Raises:
        ContractError: the trainer was built for forward passes only.

    Source:
        as `named_gradients`.
    """
    if _trained(trainer).fsdp is not None:
        yield from fsdp_megatron.owned_gradients(trainer)
        return
    for at, chunk in enumerate(trainer.chunks):
        names = {parameter: name.replace("module.", "") for name, parameter in chunk.named_parameters()}
        for parameter, _, own in owned_parts(chunk, sharded=_trained(trainer).distributed_optimizer):
            yield at, names[parameter], own


def owned_parts(chunk: Any, *, sharded: bool) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
    """Views of the gradients in a model chunk's buffers that this rank's optimizer reads.

    The chunk is not of Megatron-FSDP; if `sharded`, the optimizer is distributed.

    Yields:
        (parameter, index of the part's first element in the flattened parameter, flat view of the part).
    """
    for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
        parts = buffer.data_parallel_world_size if sharded else 1
        rank = dist.get_rank(buffer.data_parallel_group) if parts > 1 else 0
        for bucket in buffer.buckets:
            size = bucket.grad_data.numel() // parts
            least = bucket.offset + rank * size
            for parameter in bucket.params_list:
                first, end, _ = buffer.param_index_map[parameter]
                begin, end = max(first, least), min(end, least + size)
                if begin < end:
                    yield parameter, begin - first, buffer.grad_data[begin:end]


def in_norm(parameter: torch.Tensor) -> bool:
    """Tell whether Megatron's marks have this rank count a parameter in the norm of all gradients.

    Source:
        megatron-core 0.19.2, core/optimizer/optimizer.py, `MegatronOptimizer._filter_grads_for_norm`.
    """
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.optimizer import optimizer as norms

    return norms.param_is_not_shared(parameter) and tensor_parallel.param_is_not_tensor_parallel_duplicate(
        parameter, tp_group=parallel_state.get_tensor_model_parallel_group(),
        expert_tp_group=parallel_state.get_expert_tensor_parallel_group(),
    )  # fmt: skip


def named_states(trainer: TrainerModel, optimizer: Any, part: str) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Copy a part of Adam's state of each parameter, all data-parallel ranks' shards together. A collective.

    `trainer` was built with a distributed optimizer. The part is "exp_avg" or "exp_avg_sq", zero before the first step,
    or "master".

    Yields:
        (model chunk, local parameter name without wrappers, float32 tensor of the parameter's shape).

    Source:
        megatron-core 0.19.2, core/optimizer/distrib_optimizer.py, `_get_model_param_range_map`: a rank's shard of a
        parameter is a range of its elements.
    """
    if _trained(trainer).fsdp is not None:
        yield from fsdp_megatron.named_states(trainer, optimizer, part)
        return
    held = {}
    for one in optimizer.chained_optimizers:
        for parameter, (group, order) in {} if one.is_stub_optimizer else one.model_param_group_index_map.items():
            kept = one.optimizer.param_groups[group]["params"][order]
            own = master_of(one.optimizer, kept) if part == "master" else one.optimizer.state.get(kept, {}).get(part)
            if own is not None:
                held[parameter] = (one._get_model_param_range_map(parameter)["param"], own)
    for at, chunk in enumerate(trainer.chunks):
        names = {parameter: name.replace("module.", "") for name, parameter in chunk.named_parameters()}
        for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
            for parameter in buffer.param_index_map:
                whole = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
                if parameter in held:
                    place, own = held[parameter]
                    whole[place.start : place.end] = own.detach().view(-1)
                if buffer.data_parallel_world_size > 1:
                    dist.all_reduce(whole, group=buffer.data_parallel_group)
                yield at, names[parameter], whole.view(parameter.shape)


def master_of(adam: Any, held: torch.Tensor) -> torch.Tensor:
    """Return the master of a tensor in an optimizer's groups: itself, but for one that steps some of them on the host.

    Source:
        megatron-core 0.19.2, core/optimizer/cpu_offloading/hybrid_optimizer.py, `HybridDeviceOptimizer`: its groups
        and its state have the model's shards, and what it steps are copies in float32, on the host or on the device.
    """
    masters: dict[torch.Tensor, torch.Tensor] = getattr(adam, "param_to_inner_param", {})
    return masters.get(held, held)


def _gathered(buffer: Any, bucket: Any) -> torch.Tensor:
    whole, size = bucket.grad_data, buffer.data_parallel_world_size
    if size == 1:
        return whole
    mine = whole.chunk(size)[dist.get_rank(buffer.data_parallel_group)]
    gathered = torch.empty_like(whole)
    dist.all_gather_into_tensor(gathered, mine, group=buffer.data_parallel_group)
    return gathered


def _trained(trainer: TrainerModel) -> DataParallel:
    if trainer.data_parallel is None:
        raise ContractError("this trainer was built for forward passes only: build it with `data_parallel`")
    return trainer.data_parallel


def fill_states(optimizer: Any) -> None:
    """Give torch's Adam the moments of no step for each parameter that has none yet; Transformer Engine's does so."""
    for adam, _, parameter in parameters_of(torch_adams(optimizer)):
        if parameter not in adam.state:
            moments = {name: torch.zeros_like(parameter) for name in ("exp_avg", "exp_avg_sq")}
            adam.state[parameter] = {"step": torch.zeros(()), **moments}


def torch_adams(optimizer: Any) -> list[torch.optim.Adam]:
    """List the optimizers that are torch's Adam, as all are on the CPU tier."""
    every_adam = [part.optimizer for part in optimizer.chained_optimizers]
    return [adam for adam in every_adam if isinstance(adam, torch.optim.Adam)]


def parameters_of(adams: list[torch.optim.Adam]) -> Iterator[tuple[torch.optim.Adam, dict[str, Any], torch.Tensor]]:
    """Yield each parameter with its optimizer and its group."""
    for adam in adams:
        for group in adam.param_groups:
            yield from ((adam, group, parameter) for parameter in group["params"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Owned:
    """Part of a parameter that the rank's optimizer updates."""

    chunk: int
    local: str
    """Name of the parameter in its model chunk, without wrappers."""
    model: torch.Tensor
    held: torch.Tensor
    """Under which the optimizer keeps its state."""
    master: torch.Tensor
    """In float32; `held`, unless the optimizer keeps masters of its own."""
    offset: int
    """Index of its first element in the flattened parameter."""
    adam: Any
    group: dict[str, Any]

    @property
    def name(self) -> str:
        """Name by which the rank knows it."""
        return f"{self.local}{f' (chunk {self.chunk})' if self.chunk else ''}"

    @property
    def gradient(self) -> torch.Tensor:
        """Gradient buffer of the whole parameter."""
        found: torch.Tensor = self.model.main_grad  # type: ignore[attr-defined]
        return found

    def moments(self) -> dict[str, torch.Tensor]:
        """Adam's state, empty before the first step."""
        found: dict[str, torch.Tensor] = self.adam.state.get(self.held, {})
        return found


def owned_masters(trainer: TrainerModel, optimizer: Any) -> Iterator[Owned]:
    """Masters that a rank's optimizer holds, on the device or on the host; without Megatron-FSDP."""
    names = {
        id(parameter): (at, name.replace("module.", ""))
        for at, chunk in enumerate(trainer.chunks) for name, parameter in chunk.named_parameters()
    }  # fmt: skip
    for part in optimizer.chained_optimizers:
        if getattr(part, "is_stub_optimizer", False):
            continue
        models = models_of(part)
        for group in part.optimizer.param_groups:
            for held in group["params"]:
                model = models.get(id(held))
                if model is None or id(model) not in names or held.numel() == 0:
                    continue
                sharded = hasattr(part, "model_param_group_index_map")
                offset = part._get_model_param_range_map(model)["param"].start if sharded else 0
                chunk, local = names[id(model)]
                yield Owned(
                    chunk=chunk, local=local, model=model, held=held, master=master_of(part.optimizer, held),
                    offset=offset, adam=part.optimizer, group=group,
                )  # fmt: skip


def models_of(part: Any) -> dict[int, torch.Tensor]:
    """Id of each tensor in the groups of an optimizer's part -> the model's parameter; none where not known."""
    if hasattr(part, "model_param_group_index_map"):
        places = part.model_param_group_index_map.items()
        return {id(part.optimizer.param_groups[group]["params"][at]): model for model, (group, at) in places}
    if hasattr(part, "float16_groups"):
        models = [*part.float16_groups, *part.fp32_from_fp32_groups]
        masters = [*part.fp32_from_float16_groups, *part.fp32_from_fp32_groups]
        return {
            id(master): model
            for ours, theirs in zip(masters, models, strict=True)
            for master, model in zip(ours, theirs, strict=True)
        }
    return {id(item): item for group in part.optimizer.param_groups for item in group["params"]}
