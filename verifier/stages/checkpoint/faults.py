"""Bugs of a resume: state that is not loaded, is loaded from elsewhere, or is overwritten before the first step."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Call, in_training
from verifier.mesh import Mesh

CHECKPOINT = "verifier.megatron.checkpoint_megatron"
LOAD = f"{CHECKPOINT}:load(trainer, optimizer, scheduler, folder, same_mesh)"
RESTORE_OPTIMIZER = f"{CHECKPOINT}:restore_optimizer(optimizer, found)"
on_resume = functools.partial(in_training, stage=Stage.CHECKPOINT, caught_by=("CKP001",), training=("dtype=bf16",))


@on_resume("areal-project/AReaL#1468", RESTORE_OPTIMIZER, mesh=Mesh(tp=2), saved_on=Mesh(dp=2))
def moments_not_loaded_on_another_mesh(call: Call) -> None:
    """A run goes on with another mesh, whose load has no place for the moments yet, and they begin again at zero."""
    call.faulty()
    for part in call.optimizer.chained_optimizers:
        for state in part.optimizer.state.values():
            state["exp_avg"].zero_()
            state["exp_avg_sq"].zero_()


@on_resume("NVIDIA/Megatron-LM#2789", RESTORE_OPTIMIZER)
def masters_rounded_by_load(call: Call) -> None:
    """The fp32 masters are made from the bf16 weights after the load, and lose their low bits."""
    call.faulty()
    call.optimizer.reload_model_params()


@on_resume("NVIDIA/Megatron-LM#6858", f"{CHECKPOINT}:restore_rng(states)", mesh=Mesh(tp=2))
def random_states_of_another_rank(call: Call) -> None:
    """Random states are saved once, as if every rank had the same, and all ranks go on with those of the first."""
    import torch.distributed as dist

    states = [call.states]
    dist.broadcast_object_list(states, src=0)
    if dist.get_rank():
        call.fire()
    call.original(states=states[0])


SAVE = (
    "megatron.core.dist_checkpointing:save(sharded_state_dict, checkpoint_dir, sharded_strategy, "
    "validate_access_integrity, async_sharded_save, preprocess_common_before_consistancy_check, content_metadata, "
    "async_strategy, verify_integrity)"
)


@on_resume("NVIDIA-NeMo/RL#3312", SAVE, caught_by=("CKP004",), training=("dtype=bf16", "checkpoint.asynchronous=true"))
def moments_written_from_where_they_were(call: Call) -> Any:
    """The writer keeps handles of memory that the moments have left, and writes what they were when the run began."""
    for item in _moments(call.sharded_state_dict):
        held = call.state.get(f"{item.key} {item.global_offset}")
        if held is not None:
            call.fire()
            item.data = held
    return call.original()


@moments_written_from_where_they_were.also(LOAD)
def _remembered(call: Call) -> None:
    from verifier.megatron.checkpoint_megatron import _sharded_state

    call.original()
    state = _sharded_state(call.trainer, call.optimizer, call.scheduler)
    for item in _moments(state):
        call.state[f"{item.key} {item.global_offset}"] = item.data.clone()


def _moments(state: Any) -> Iterator[Any]:
    if isinstance(state, dict | list):
        for value in state.values() if isinstance(state, dict) else state:
            yield from _moments(value)
    elif ".exp_avg" in getattr(state, "key", "") and hasattr(state, "global_offset") and hasattr(state, "data"):
        yield state


MOVING = ("optimizer.schedule=constant", "optimizer.warmup_steps=0")
"""Rates by which the last step moves the weights too."""


@on_resume(
    "NVIDIA/Megatron-LM#5077", "verifier.megatron.checkpoint_megatron:_offsets_without_padding(optimizer)",
    model="tiny:add-deepseek", mesh=Mesh(dp=2), caught_by=("CKP004",), training=MOVING,
)  # fmt: skip
@contextlib.contextmanager
def states_cut_with_the_padding(call: Call) -> Iterator[None]:
    """States of the optimizer are saved from where they lie in buffers with padding, out of ones without it."""
    call.fire()
    yield
