"""Megatron-FSDP: weights gathered whole for whoever reads them, and this rank's shards of gradients and of state.

Megatron-FSDP has two parameters for each name. The raw one is what the model computes with, of the weights' type, whose
memory is there only while it is gathered. The distributed one is a DTensor over this rank's shard of the master, in
fp32, which the optimizer steps. Each shard is a range of the elements of the tensor-parallel parameter.

Source:
    megatron-core 0.19.2, core/distributed/fsdp/src/megatron_fsdp: megatron_fsdp.py (`start_param_sync`,
    `_replace_param_with_raw_if_needed`), param_and_grad_buffer.py (`_init_optimizer_named_parameters`,
    `update_main_grads`, `copy_main_weights_to_model_weights`).
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from verifier.errors import ContractError
from verifier.model.provider_megatron import TrainerModel

State = dict[str, Any]
"""A rank's shards, by kind: tensors by name, on the host, and the optimizer's counts of steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Shard:
    """This rank's shard of one parameter."""

    chunk: int
    name: str
    """Name of the parameter, without wrappers."""
    parameter: Any
    """The optimizer's, a DTensor."""
    shape: torch.Size
    """Shape of the tensor-parallel parameter."""
    place: slice
    """Elements of it that this rank has."""
    group: Any
    """Ranks that have the others."""

    @property
    def key(self) -> str:
        """Name that no other parameter of the rank has."""
        return f"{self.name} (chunk {self.chunk})"

    def whole(self, local: torch.Tensor | None) -> torch.Tensor:
        """All ranks' shards of a tensor like this parameter, in fp32; None for an empty shard. A collective."""
        whole = torch.zeros(self.shape.numel(), dtype=torch.float32, device=self.parameter.device)
        if local is not None:
            whole[self.place] = local.detach().reshape(-1).float()
        if dist.get_world_size(self.group) > 1:
            dist.all_reduce(whole, group=self.group)
        return whole.view(self.shape)


def is_fsdp(trainer: TrainerModel) -> bool:
    """True if Megatron-FSDP wraps the model."""
    return trainer.data_parallel is not None and trainer.data_parallel.fsdp is not None


def chained(optimizer: Any) -> Any:
    """The optimizer as the only part of a chain, which Megatron makes of every other optimizer."""
    from megatron.core.optimizer import ChainedOptimizer

    return optimizer if hasattr(optimizer, "chained_optimizers") else ChainedOptimizer([optimizer])


@contextlib.contextmanager
def gathered(trainer: TrainerModel) -> Iterator[None]:
    """Hold all weights on every rank for the duration of the context, as the model computes with them. A collective.

    Raises:
        ContractError: a weight is not whole, so nothing may read it.
    """
    for chunk in trainer.chunks:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a gather that the end of a step began is waited for
            chunk.module.start_param_sync(force_sync=True)
        chunk.module._replace_param_with_raw_if_needed()
        for name, parameter in chunk.named_parameters():
            if hasattr(parameter, "_local_tensor") or parameter.untyped_storage().nbytes() == 0:
                raise ContractError(f"Megatron-FSDP has not gathered `{name}`: its weight is not to be read")
    try:
        yield
    finally:
        for chunk in trainer.chunks:
            chunk.module.synchronize_param_gather()


def named_gradients(trainer: TrainerModel) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Gather the reduced gradients; see `optimizer_megatron.named_gradients`. A collective."""
    for shard in _shards(trainer):
        yield shard.chunk, shard.name, shard.whole(_local(shard.parameter.grad))


def owned_gradients(trainer: TrainerModel) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Views of the reduced gradients of this rank's shards; see `optimizer_megatron.owned_gradients`."""
    for shard in _shards(trainer):
        local = _local(shard.parameter.grad)
        if local is not None and local.numel():
            yield shard.chunk, shard.name, local.reshape(-1)


def named_states(trainer: TrainerModel, optimizer: Any, part: str) -> Iterator[tuple[int, str, torch.Tensor]]:
    """Gather a part of Adam's state; see `optimizer_megatron.named_states`. A collective."""
    states = _states(optimizer)
    for shard in _shards(trainer):
        own = shard.parameter if part == "master" else states.get(shard.parameter, {}).get(part)
        yield shard.chunk, shard.name, shard.whole(_local(own))


def optimizer_facts(trainer: TrainerModel, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's shards of masters and moments, and steps, by the name of their parameter."""
    states = _states(optimizer)
    for shard in _shards(trainer):
        if not _required(shard.parameter).numel():
            continue
        yield f"optimizer/master/{shard.key}", _required(shard.parameter)
        for key, value in sorted(states.get(shard.parameter, {}).items()):
            if isinstance(value, torch.Tensor):
                yield f"optimizer/{key}/{shard.key}", _required(value)
    for index, group in enumerate(_groups(optimizer)):
        if "step" in group:
            yield f"optimizer/step/group {index}", torch.tensor(int(group["step"]))


def state_of(trainer: TrainerModel, optimizer: Any) -> State:
    """Copy to the host what this rank has to have again in order to continue; no collective."""
    states, shards = _states(optimizer), list(_shards(trainer))
    return {
        "masters": {shard.key: _copied(shard.parameter) for shard in shards},
        "states": {
            shard.key: {key: _copied(value) for key, value in states[shard.parameter].items()}
            for shard in shards
            if states.get(shard.parameter)
        },
        "buffers": {name: _copied(tensor) for name, tensor in _buffers(trainer)},
        "steps": [int(group["step"]) if "step" in group else None for group in _groups(optimizer)],
    }


def restore(trainer: TrainerModel, optimizer: Any, found: State) -> None:
    """Put what `state_of` copied into a new model and optimizer, and the weights that the masters round to.

    Raises:
        ContractError: it is not of this rank's shards.
    """
    shards, buffers = list(_shards(trainer)), dict(_buffers(trainer))
    if found["masters"].keys() != {shard.key for shard in shards} or found["buffers"].keys() != buffers.keys():
        raise ContractError("the checkpoint has other parameters than Megatron-FSDP shards here")
    if found["states"]:
        for part in optimizer.chained_optimizers:
            part._init_optimizer_states_with_dummy_values()  # a step; all that it changes is loaded
    states = _states(optimizer)
    with torch.no_grad():
        for shard in shards:
            _fill(shard.key, shard.parameter, found["masters"][shard.key])
            held = states.get(shard.parameter, {})
            for key, value in found["states"].get(shard.key, {}).items():
                if isinstance(value, torch.Tensor) and isinstance(held.get(key), torch.Tensor):
                    _fill(f"{key} of {shard.key}", held[key], value)
                elif key in held:
                    held[key] = value
                else:
                    raise ContractError(f"the optimizer has no {key} of {shard.key} to load")
        for name, tensor in buffers.items():
            _fill(name, tensor, found["buffers"][name])
    for group, step in zip(_groups(optimizer), found["steps"], strict=True):
        if step is not None:
            group["step"] = step
    for chunk in trainer.chunks:
        chunk.module.install_optimized_model_weights()


def _shards(trainer: TrainerModel) -> Iterator[_Shard]:
    """Shards of this rank, in the same order on every rank; of those that are empty too."""
    for at, chunk in enumerate(trainer.chunks):
        buffer = chunk.param_and_grad_buffer
        for name, parameter in buffer.optimizer_named_parameters:
            raw = parameter.orig_param
            place = parameter.megatron_fsdp_slice
            if place.stop - place.start != _required(parameter).numel():
                raise ContractError(f"Megatron-FSDP's shard of `{name}` is not where it says: {place}")
            group = buffer.parameter_groups[buffer.param_to_param_group[raw]].main_grad_buffer.data_parallel_group
            yield _Shard(
                chunk=at, name=name.replace("module.", ""), parameter=parameter, shape=raw.shape, place=place,
                group=group,
            )  # fmt: skip


def _buffers(trainer: TrainerModel) -> Iterator[tuple[str, torch.Tensor]]:
    for at, chunk in enumerate(trainer.chunks):
        yield from ((f"{name} (chunk {at})", tensor) for name, tensor in chunk.named_buffers())


def _states(optimizer: Any) -> dict[Any, dict[str, Any]]:
    return {
        parameter: state for part in optimizer.chained_optimizers for parameter, state in part.optimizer.state.items()
    }


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [group for part in optimizer.chained_optimizers for group in part.optimizer.param_groups]


def _local(tensor: Any) -> torch.Tensor | None:
    if tensor is None:
        return None
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def _required(tensor: Any) -> torch.Tensor:
    local = _local(tensor)
    assert local is not None
    return local


def _copied(value: Any) -> Any:
    return _required(value).cpu().clone() if isinstance(value, torch.Tensor) else value


def _fill(name: str, tensor: Any, values: torch.Tensor) -> None:
    local = _required(tensor)
    if local.shape != values.shape or local.dtype != values.dtype:
        raise ContractError(
            f"the checkpoint has {tuple(values.shape)} {values.dtype} of `{name}`, "
            f"and this rank {tuple(local.shape)} {local.dtype}"
        )
    local.copy_(values)
