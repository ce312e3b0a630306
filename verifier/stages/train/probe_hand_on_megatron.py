"""Gradients, weights and moments of an update, joined from all ranks for the oracle."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from verifier.core.record import Probe, real
from verifier.export.live_weights import LiveWeights
from verifier.export.save import save_checkpoint
from verifier.megatron import lora_megatron
from verifier.megatron.optimizer_megatron import named_gradients, named_states
from verifier.megatron.router_replay_megatron import routers_of
from verifier.megatron.step_megatron import params_synced
from verifier.model.adapted import Adapted
from verifier.model.checkpoint import Checkpoint, open_checkpoint
from verifier.model.provider_megatron import TrainerModel
from verifier.probes.training.kept_records import Kept
from verifier.stages.export.probe_tensors import passing, record_tensors
from verifier.stages.export.records import ShardAfterExport
from verifier.stages.load.probe_configs_megatron import record_live
from verifier.stages.load.records import AdapterShard, AdapterSpread, LoadedShard
from verifier.stages.train.records import (
    FrozenShard,
    JoinedTensor,
    LiveAdapterMatrix,
    LiveAdapterScaling,
    RouterBalance,
    UpdatedShard,
)
from verifier.trainer.weight_sync_megatron import Adapters, joined


class HandOn:
    """Writer of what `verifier.oracle.policy_hf` reads, as checkpoint directories. Every method is a collective.

    Args:
        trainer: built with a distributed optimizer.
        optimizer: whose moments are handed on.
        live: weights of the trainer, of a family with a layout.
        rank: this rank; rank 0 joins the shards of all.
        folder: for the step, the same for all ranks.
        source: whose config.json goes with the tensors.
        adapters: whose matrices `live` are; None for a trainer of all weights.
    """

    def __init__(
        self, trainer: TrainerModel, optimizer: Any, live: LiveWeights, rank: int, folder: Path, source: Checkpoint,
        adapters: Adapters | None = None,
    ) -> None:  # fmt: skip
        self._trainer, self._optimizer, self._live, self._rank = trainer, optimizer, live, rank
        self._folder, self._source, self._adapters = folder, source, adapters

    def before(self, number: int, *, first: bool, probe: Probe | None = None, version: int = 0) -> None:
        """Hand on what an update begins with; its weights are those that the update before it left, if it had one.

        Args:
            number: of the update.
            first: its weights have not been handed on.
            probe: records them as a version, whose export it has; no adapters.
            version: of the weights.
        """
        if first:
            self.after(number - 1, probe, version)
        rounded = ["master"] if self._trainer.provider.bf16 else []
        for part in ("exp_avg", "exp_avg_sq", *rounded):
            states = named_states(self._trainer, self._optimizer, part)
            self._save(f"{part}-{number}", states, gradients=part != "master")

    def gradients(self, number: int, name: str = "gradients") -> None:
        """Hand on reduced gradients, between backward pass and step, under a name."""
        self._save(f"{name}-{number}", named_gradients(self._trainer), gradients=True)

    def after(self, number: int, probe: Probe | None = None, version: int = 0) -> dict[str, torch.Tensor]:
        """Hand on what an update made, and record all weights, if asked to, for the export that follows.

        Returns:
            On rank 0, what was handed on: weights, or the matrices of adapters, by published name.
        """
        name, adapters = f"weights-{number}", self._adapters
        with params_synced(self._trainer):
            found = self._save(name, self._live.tensors(), probe=probe, version=version)
        if adapters is None:
            return found
        if self._rank == 0:
            told = Adapted(base=str(self._source.path), scaling=adapters.lora.scaling, names=adapters.names())
            told.save(self._folder / name)
        return adapters.published(found)

    def _save(
        self, name: str, tensors: Iterable[tuple[int, str, torch.Tensor]], *, gradients: bool = False,
        probe: Probe | None = None, version: int = 0,
    ) -> dict[str, torch.Tensor]:  # fmt: skip
        """Join tensors of all ranks, values or gradients by them, into files, which rank 0 maps; record them."""
        whole = joined(self._live, tensors, self._folder / f"{name}-shards", self._rank, gradients=gradients)
        if self._rank:
            return {}
        if probe is not None:
            whole = passing(probe, JoinedTensor, whole, version)
        written = open_checkpoint(save_checkpoint(self._folder / name, self._source.config, whole))
        return {each: written.read(each) for each in written.names()}


class AdapterEvidence:
    """Base and adapters, as attached, before any step, and as they are. All methods are collectives."""

    def __init__(self, trainer: TrainerModel, adapters: Adapters, rank: int) -> None:
        self._trainer, self._adapters, self._rank = trainer, adapters, rank
        self._loaded, self._begun = Kept(), Kept()
        with params_synced(trainer):
            record_live(self._loaded, adapters.base, 0, LoadedShard)
        record_live(self._begun, adapters.trained, 0, AdapterShard)
        record_spreads(self._begun, adapters.matrices())

    def record_update(self, probe: Probe, version: int) -> None:
        """Record what ranks hold after the steps that made a version, beside the base as it was loaded."""
        self._loaded.record(probe)
        if version == 1:
            self._begun.record(probe)
        with params_synced(self._trainer):
            record_live(probe, self._adapters.base, version, UpdatedShard, FrozenShard)
            record_live(probe, self._adapters.trained, version, UpdatedShard)
        self.record_matrices(probe, version)

    def record_matrices(self, probe: Probe, version: int) -> dict[str, torch.Tensor]:
        """Record the live matrices by their published names, on rank 0, and their factor; return them."""
        matrices = self._adapters.matrices()
        record_matrices(probe, self._trainer, matrices, version, self._rank)
        return matrices

    def record_exported(self, probe: Probe, version: int) -> None:
        """Record what ranks hold after an export."""
        with params_synced(self._trainer):
            record_live(probe, self._adapters.base, version, ShardAfterExport)
            record_live(probe, self._adapters.trained, version, ShardAfterExport)


def record_spreads(probe: Probe, matrices: Mapping[str, torch.Tensor]) -> None:
    """Record how far the matrices of new adapters spread, by their published names."""
    for name, matrix in matrices.items():
        deviation = real(float(matrix.double().square().mean().sqrt()))
        probe.emit(AdapterSpread(name=name, shape=tuple(matrix.shape), deviation=deviation))


def record_matrices(
    probe: Probe, trainer: TrainerModel, matrices: Mapping[str, torch.Tensor], version: int, rank: int
) -> None:
    """Record the live matrices by their published names, and, on rank 0, the factor of the trainer's adapters."""
    record_tensors(probe, LiveAdapterMatrix, matrices.items(), version)
    scaling = real(lora_megatron.scaling_of(trainer))
    if rank == 0:
        probe.emit(LiveAdapterScaling(name="alpha / rank", version=version, scaling=scaling))


_LEFT: MutableMapping[torch.nn.Module, torch.Tensor] = WeakKeyDictionary()
"""Router -> its score bias as the last recorded update left it."""


@contextlib.contextmanager
def router_balance(
    probe: Probe, trainer: TrainerModel, name: str, version: int, *, rate: float
) -> Iterator[None]:  # fmt: skip
    """Record the score biases of this rank's routers before and after the body, an update, with the tokens it counted.

    A token is counted where a router gives it to an expert, by the router's output, within the forward pass of a model
    chunk: once for each micro-batch. What is recomputed runs later, in the backward pass, and is not counted. Rows of
    padding count like others, as megatron-core counts them where it is given no mask of them. A rank whose routers have
    no score bias records nothing.
    """
    routers = {layer: router for chunk in trainer.chunks for layer, router in _biased(chunk).items()}
    if not routers:
        yield
        return
    layers = sorted(routers)
    counts = {layer: torch.zeros_like(routers[layer].expert_bias, dtype=torch.int64) for layer in layers}
    before = _biases(routers)
    with contextlib.ExitStack() as stack:
        for chunk in trainer.chunks:
            _count(chunk, counts, stack)
        yield
    arrays = {
        "before": before, "after": _biases(routers), "tokens": torch.stack([counts[layer] for layer in layers])
    }  # fmt: skip
    if all(router in _LEFT for router in routers.values()):
        arrays["left"] = torch.stack([_LEFT[routers[layer]] for layer in layers])
    _LEFT.update(zip((routers[layer] for layer in layers), arrays["after"], strict=True))
    at = trainer.mesh.coordinate(dist.get_rank())
    record = RouterBalance(name=name, version=version, coordinate=str(at), layers=tuple(layers), rate=rate)
    probe.emit(record, arrays)


def _count(chunk: torch.nn.Module, counts: dict[int, torch.Tensor], stack: contextlib.ExitStack) -> None:
    """Count what a chunk's routers choose while its own forward pass runs, until the stack is closed."""
    inside = False

    def enter(*_: Any) -> None:
        nonlocal inside
        inside = True

    def leave(*_: Any) -> None:
        nonlocal inside
        inside = False

    stack.callback(chunk.register_forward_pre_hook(enter).remove)
    stack.callback(chunk.register_forward_hook(leave).remove)
    for layer, router in _biased(chunk).items():

        def look(_: object, __: object, output: Any, layer: int = layer) -> None:
            if inside:
                counts[layer] += output[1].sum(0)  # [rows, experts], True where a row goes to an expert

        stack.callback(router.register_forward_hook(look).remove)


def _biases(routers: dict[int, Any]) -> torch.Tensor:
    return torch.stack([routers[layer].expert_bias.detach().float() for layer in sorted(routers)]).clone()


def _biased(chunk: torch.nn.Module) -> dict[int, Any]:
    return {layer: router for layer, router in routers_of(chunk).items() if router.expert_bias is not None}
