"""Digests of a rank's whole state: weights, masters, moments, counters, random states."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import torch

from verifier.config.megatron import MegatronOptions
from verifier.export.live_weights import LiveWeights
from verifier.export.sharding import ParamPlacement
from verifier.megatron import fsdp_megatron
from verifier.megatron.checkpoint_megatron import rng_states
from verifier.megatron.optimizer_megatron import owned_masters, steps_of
from verifier.megatron.step_megatron import params_synced
from verifier.model.provider_megatron import READS_IMAGES, DataParallel, FullySharded, TrainerModel
from verifier.plan.digest import described, digest_tensors
from verifier.trainer.upstream_fields import Part

Facts = list[dict[str, Any]]
"""Name, coordinate, digest, dtype and shape of each part of a rank's state."""


def state_facts(trainer: TrainerModel, live: LiveWeights, optimizer: Any, scheduler: Any, rank: int) -> Facts:
    """Digest everything that a checkpoint must bring back.

    Every parameter has to be gathered.
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
    digests = digests_of(reference, live)
    return [{"name": f"reference/{name}", "coordinate": "", **facts} for name, facts in digests.items()]


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


ELEMENTS = 32
"""Elements of each tensor of the checkpoint, at most; of a stack of experts, as many times the experts."""
COUNT = "count"
"""Part of a state that has counts: of the optimizer, and of the scheduler."""

Elements = dict[str, dict[str, tuple[list[int], list[int]]]]
"""Part of a state -> tensor of the checkpoint -> indices in its flattened form, and the bits of float32 there."""


def elements_of(
    trainer: TrainerModel, optimizer: Any, scheduler: Any, lives: Sequence[LiveWeights],
    reference: Sequence[torch.Tensor] = (),
) -> Elements:  # fmt: skip
    """Elements that this rank holds of weights, reference, masters and moments, and what was counted. A collective.

    The last of `lives` is what it trains, with a tensor of `reference` for each, if the run has one. What has no place
    in the checkpoint is left out.
    """
    if fsdp_megatron.is_fsdp(trainer):  # another mesh does not load its checkpoints
        return {}
    with params_synced(trainer):
        return _found(trainer, optimizer, scheduler, lives, reference)


def _found(
    trainer: TrainerModel, optimizer: Any, scheduler: Any, lives: Sequence[LiveWeights],
    reference: Sequence[torch.Tensor],
) -> Elements:  # fmt: skip
    parts: dict[str, list[tuple[ParamPlacement, int, torch.Tensor]]] = defaultdict(list)
    for live in lives:
        for at, (chunk, name, tensor) in enumerate(live.tensors()):
            if place := live.places.get((chunk, name)):
                parts["weight"].append((place, 0, tensor))
                if reference and live is lives[-1]:
                    parts["reference"].append((place, 0, reference[at]))
    for owned in owned_masters(trainer, optimizer):
        if place := lives[-1].places.get((owned.chunk, owned.local)):
            parts["master"].append((place, owned.offset, owned.master.detach()))
            for name, state in owned.moments().items():
                if isinstance(state, torch.Tensor) and state.numel() == owned.master.numel() and name != "step":
                    parts[name].append((place, owned.offset, state))
    counts = {"optimizer steps": steps_of(optimizer), "scheduler steps": int(scheduler.num_steps)}
    found: Elements = {COUNT: {name: ([0], [value]) for name, value in counts.items()}}
    return found | {part: _cut(items) for part, items in sorted(parts.items())}


def _cut(items: Iterable[tuple[ParamPlacement, int, torch.Tensor]]) -> dict[str, tuple[list[int], list[int]]]:
    """Elements of tensors, each the part of a placement's from an index on; the device is waited for once."""
    places, pieces = [], [torch.zeros(0)]
    for placement, begin, tensor in items:
        flat = tensor.reshape(-1)
        for source, whole, local in chosen_in(placement):
            held = (local >= begin) & (local < begin + flat.numel())
            if held.any():
                places.append((source, whole[held]))
                pieces.append(flat[torch.from_numpy(local[held] - begin).to(flat.device)].float())
    device = pieces[-1].device
    bits = torch.cat([piece.to(device) for piece in pieces]).cpu().view(torch.int32).numpy().view(np.uint32)
    found: dict[str, tuple[list[int], list[int]]] = {}
    at = 0
    for source, whole in places:
        indices, values = found.setdefault(source, ([], []))
        indices += whole.tolist()
        values += bits[at : at + len(whole)].tolist()
        at += len(whole)
    return found


def chosen_in(placement: ParamPlacement) -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """Elements of the checkpoint that are chosen, on any mesh the same, and lie in a local tensor.

    Yields:
        (tensor of the checkpoint, indices in its flattened form, indices in the flattened local tensor), a box each.
    """
    begin = 0
    for box in placement.boxes:
        shape = placement.source_shapes[box.source]
        count = ELEMENTS * (1 if box.index is None else shape[0])
        generator = np.random.default_rng(zlib.crc32(box.source.encode()))
        whole = np.unique(generator.integers(math.prod(shape), size=count))
        at = list(np.unravel_index(whole, shape))
        along = at[placement.source_dim(box)]
        inside = (along >= box.begin) & (along < box.end)
        if box.index is not None:
            inside &= at.pop(0) == box.index
        if placement.transposed:
            at[-2:] = reversed(at[-2:])
        at[placement.dim] = at[placement.dim] - box.begin + begin
        local = [each[inside] for each in at]
        yield box.source, whole[inside], np.ravel_multi_index(local, placement.shape)
        begin += box.size


def write_saved(folder: Path, rank: int, held: Facts, elements: Elements) -> None:
    """Write what a rank held at a save into a checkpoint."""
    file = saved_file(folder, rank)
    file.write_bytes(msgspec.json.encode(held))
    file.with_suffix(".elements.json").write_bytes(msgspec.json.encode(elements))


def saved_file(folder: Path, rank: int) -> Path:
    """File of a rank in a checkpoint: digests of what it held."""
    return folder / "saved" / f"{rank:04d}.json"


def data_parallel_of(options: MegatronOptions) -> DataParallel:
    """Return the options of data parallelism that a config asks for."""
    return DataParallel(
        distributed_optimizer=options.distributed_optimizer, overlap_grad_reduce=options.overlap_grad_reduce,
        overlap_param_gather=options.overlap_param_gather, grad_reduce_in_fp32=options.grad_reduce_in_fp32,
        bucket_size=options.bucket_size, offload=options.optimizer_offload,
        overlap_offload=options.overlap_optimizer_offload, fsdp=_fsdp_of(options),
    )  # fmt: skip


def _fsdp_of(options: MegatronOptions) -> FullySharded | None:
    if not options.use_fsdp:
        return None
    return FullySharded(
        sharding=options.fsdp_sharding, prefetch=options.fsdp_prefetch,
        unit_elements=options.fsdp_unit_elements,
    )  # fmt: skip


def settings_of(trainer: TrainerModel, optimizer: Any, scheduler: Any) -> dict[Part, list[Any]]:
    """Return the live objects that hold settings, each once: layers may have copies of the model's config."""
    named = [item for chunk in trainer.chunks for item in chunk.named_modules()]
    modules = [module for name, module in named if not name.replace("module.", "").startswith(READS_IMAGES)]
    configs = {id(item): item for module in modules if hasattr(item := getattr(module, "config", None), "num_layers")}
    groups = [group for part in optimizer.chained_optimizers for group in part.optimizer.param_groups]
    return {
        "model": list(configs.values()), "ddp": [chunk.ddp_config for chunk in trainer.chunks],
        "optimizer": [part.config for part in optimizer.chained_optimizers],
        "adam": [
            SimpleNamespace(beta_1=group["betas"][0], beta_2=group["betas"][1], eps=group["eps"]) for group in groups
        ],
        "scheduler": [scheduler], "adapter": _adapters_of(trainer),
    }  # fmt: skip


def effective_settings(trainer: TrainerModel, optimizer: Any) -> dict[str, Any]:
    """Return plain fields of the transformer config, of data parallelism and of the optimizer that a rank runs with."""
    parts = {"model": trainer.provider, "ddp": trainer.chunks[0].ddp_config, "optimizer": optimizer.config}
    return {name: _plain(part) for name, part in parts.items()}


def _plain(part: Any) -> dict[str, Any]:
    values = {item.name: getattr(part, item.name, None) for item in dataclasses.fields(part)}
    return {
        name: value if isinstance(value, int | float | str | None) else str(value)
        for name, value in values.items()
        if isinstance(value, int | float | str | torch.dtype | None)
    }


def _adapters_of(trainer: TrainerModel) -> list[Any]:
    """Rank and alpha of every adapter of a rank, and the names of the linears that have one."""
    every = (item for chunk in trainer.chunks for item in chunk.named_modules())
    named = {name: module for name, module in every if type(module).__name__ == "ParallelLinearAdapter"}
    targets = sorted({name.split(".")[-2] for name in named})
    return [SimpleNamespace(dim=module.dim, alpha=module.alpha, targets=targets) for module in named.values()]
