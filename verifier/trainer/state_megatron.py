"""Digests of a rank's whole state: weights, masters, moments, counters, random states."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from verifier.export.live_weights import LiveWeights
from verifier.model.provider_megatron import TrainerModel
from verifier.plan.digest import described, digest_tensors
from verifier.train import fsdp_megatron
from verifier.train.checkpoint_megatron import rng_states

Facts = list[dict[str, Any]]
"""Name, coordinate, digest, dtype and shape of each part of a rank's state."""


def state_facts(trainer: TrainerModel, live: LiveWeights, optimizer: Any, scheduler: Any, rank: int) -> Facts:
    """Digest everything that a checkpoint must bring back.

    Args:
        trainer: with every parameter gathered.
        live: of the trainer.
        optimizer: from `make_optimizer`.
        scheduler: from `make_step_scheduler`.
        rank: this rank.
    """
    at = str(trainer.mesh.coordinate(rank))
    named = [(f"weight/{name} (chunk {chunk})", tensor) for chunk, name, tensor in live.tensors()]
    named += [*_optimizer_state(trainer, optimizer), ("scheduler/steps", torch.tensor(int(scheduler.num_steps)))]
    named += [(f"rng/{name}", tensor) for name, tensor in _random()]
    digests = digest_tensors(tensor for _, tensor in named)
    return [
        {"name": name, "coordinate": at, **described(tensor, digest)}
        for (name, tensor), digest in zip(named, digests, strict=True)
    ]


def reference_facts(reference: Sequence[torch.Tensor], live: LiveWeights) -> Facts:
    """Digest a frozen reference, a tensor for each of the live ones; none where the run has no reference."""
    names = [f"reference/{name} (chunk {chunk})" for chunk, name, _ in live.tensors()] if reference else []
    digests = digest_tensors(reference)
    return [
        {"name": name, "coordinate": "", **described(tensor, digest)}
        for name, tensor, digest in zip(names, reference, digests, strict=True)
    ]


@contextlib.contextmanager
def replaced(live: LiveWeights, others: Sequence[torch.Tensor]) -> Iterator[None]:
    """Put other values in the place of the live weights for the body, and put these back."""
    with torch.no_grad():
        own = [tensor for _, _, tensor in live.tensors()]
        aside = [tensor.clone() for tensor in own]
        for tensor, other in zip(own, others, strict=True):
            tensor.copy_(other)
        try:
            yield
        finally:
            for tensor, values in zip(own, aside, strict=True):
                tensor.copy_(values)


def digests_of(tensors: Sequence[torch.Tensor], live: LiveWeights) -> dict[str, dict[str, Any]]:
    """Digest, dtype and shape of tensors in the order of the live ones, by their names; none for none."""
    names = [f"{name} (chunk {chunk})" for chunk, name, _ in live.tensors()] if tensors else []
    parts = zip(names, tensors, digest_tensors(tensors), strict=True)
    return {name: described(tensor, digest) for name, tensor, digest in parts}


def _optimizer_state(trainer: TrainerModel, optimizer: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """This rank's masters, moments and steps, by the name of their parameter."""
    if fsdp_megatron.is_fsdp(trainer):
        yield from fsdp_megatron.optimizer_facts(trainer, optimizer)
        return
    names = {
        parameter: f"{name.replace('module.', '')} (chunk {chunk})"
        for chunk, module in enumerate(trainer.chunks)
        for name, parameter in module.named_parameters()
    }
    for part in optimizer.chained_optimizers:
        if part.is_stub_optimizer:
            continue
        groups = part.optimizer.param_groups
        for parameter, (group, order) in part.model_param_group_index_map.items():
            master = groups[group]["params"][order]
            yield f"optimizer/master/{names[parameter]}", master.detach()
            for key, value in sorted(part.optimizer.state.get(master, {}).items()):
                if isinstance(value, torch.Tensor):
                    yield f"optimizer/{key}/{names[parameter]}", value.detach()
        for index, group in enumerate(groups):
            if "step" in group and not isinstance(part.optimizer, torch.optim.Adam):  # torch's has one a parameter
                yield f"optimizer/step/group {index}", torch.tensor(int(group["step"]))


def _random() -> Iterator[tuple[str, torch.Tensor]]:
    states = rng_states()
    for name, state in (*states.pop("tracker").items(), *states.items()):
        if not isinstance(state, torch.Tensor):
            state = torch.frombuffer(bytearray(repr(state).encode()), dtype=torch.uint8)
        yield name, state


def write_facts(file: Path, facts: Facts) -> None:
    """Write facts as JSON."""
    file.write_bytes(msgspec.json.encode(facts))
