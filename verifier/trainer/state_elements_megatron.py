"""Some elements of a rank's state by the place in the checkpoint that they belong to, which is the same on any mesh."""

from __future__ import annotations

import math
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from verifier.export.live_weights import LiveWeights
from verifier.export.sharding import ParamPlacement
from verifier.model.provider_megatron import TrainerModel
from verifier.train import fsdp_megatron
from verifier.train.masters_megatron import owned_masters
from verifier.train.optimizer_megatron import steps_of
from verifier.train.step_megatron import params_synced

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

    Args:
        trainer: built with `data_parallel`.
        optimizer: from `make_optimizer`.
        scheduler: from `make_step_scheduler`.
        lives: of the trainer, what it trains last; what has no place in the checkpoint is left out.
        reference: a frozen tensor for each of the last one's, if the run has a reference.
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


def write_elements(file: Path, elements: Elements) -> None:
    """Write elements as JSON."""
    file.write_bytes(msgspec.json.encode(elements))
