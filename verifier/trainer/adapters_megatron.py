"""Adapters of a training run, on one rank: the frozen base, the matrices that are trained, and their evidence."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from msgspec.structs import replace

from verifier.config.lora import LoraOptions
from verifier.core.record import real
from verifier.core.records_weights import (
    AdapterShard,
    AdapterSpread,
    FrozenShard,
    LiveAdapterMatrix,
    LiveAdapterScaling,
    LoadedShard,
    ShardAfterExport,
    UpdatedShard,
)
from verifier.core.store import Recorder
from verifier.errors import ContractError
from verifier.export.adapters import adapters_of, in_adapter, in_base
from verifier.export.names import layout_of
from verifier.model.checkpoint import Checkpoint
from verifier.model.provider_megatron import TrainerModel
from verifier.probes.weights_megatron import LiveWeights, record_exported_adapter, record_tensors
from verifier.train import lora_megatron
from verifier.train.lora_megatron import LoraSpec
from verifier.train.step_megatron import params_synced


def spec_of(options: LoraOptions) -> LoraSpec | None:
    """Adapters that a config asks for; None for none."""
    if options.rank is None:
        return None
    return LoraSpec(options.rank, options.effective_alpha, options.targets)


def joined(
    live: LiveWeights, tensors: Iterable[tuple[int, str, torch.Tensor]], folder: Path, rank: int,
    *, gradients: bool = False,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """On rank 0, tensors of all ranks by checkpoint name, joined by the layout without Megatron-Bridge. A collective.

    Args:
        live: whose layout names them.
        tensors: (chunk, local name, contents).
        folder: for shards, the same for all ranks, absent before and after.
        rank: this one.
        gradients: see `LiveWeights.join`.
    """
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    live.dump(folder, tensors)
    dist.barrier()
    whole = live.join(folder, gradients=gradients) if rank == 0 else {}
    if rank == 0:
        shutil.rmtree(folder)
    return whole


class Adapters:
    """The two parts of a model with adapters. Methods are collectives.

    Args:
        trainer: built with `lora_megatron.attach`.
        source: checkpoint of the base, of a family with a layout.
        lora: what was attached.
        rank: this one.
        folder: of the run's adapters, the same for all ranks.

    Attributes:
        lora: what was attached.
        base: tensors that no step changes, under the names that they have without adapters.
        trained: matrices of the adapters.

    Raises:
        ContractError: the family has no layout.
    """

    def __init__(self, trainer: TrainerModel, source: Checkpoint, lora: LoraSpec, rank: int, folder: Path) -> None:
        layout = layout_of(source.config)
        if layout is None:
            raise ContractError("a family without a layout has no layout of its adapters")
        self.lora, self._trainer, self._rank, self._folder = lora, trainer, rank, folder
        self.layout = adapters_of(layout, lora.targets, lora.rank)
        mesh = trainer.mesh
        self.base = LiveWeights(trainer.chunks, layout, mesh, rank, in_base)
        self.trained = LiveWeights(trainer.chunks, self.layout, mesh, rank, in_adapter)
        self._loaded = Kept()
        with params_synced(trainer):
            self.base.record(self._loaded, 0, LoadedShard)
        self._begun = Kept()
        self.trained.record(self._begun, 0, AdapterShard)
        for name, matrix in self.matrices().items():
            deviation = real(float(matrix.double().square().mean().sqrt()))
            self._begun.emit(AdapterSpread(name=name, shape=tuple(matrix.shape), deviation=deviation))

    def matrices(self) -> dict[str, torch.Tensor]:
        """On rank 0, the live matrices under each of their published names, joined by the layout."""
        with params_synced(self._trainer):
            found = joined(self.trained, self.trained.tensors(), self._folder / "shards", self._rank)
        return dict(self.layout.spread(found))

    def record_update(self, probe: Recorder, version: int, *, begins: bool) -> None:
        """Record what ranks hold after the steps that made a version, beside the base as it was loaded.

        Args:
            probe: this rank's.
            version: of the weights.
            begins: the run began with the weights before; then the adapters as they were attached, too.
        """
        self._loaded.record(probe)
        if begins:
            self._begun.record(probe)
        with params_synced(self._trainer):
            self.base.record(probe, version, UpdatedShard, FrozenShard)
            self.trained.record(probe, version, UpdatedShard)
        self.record_matrices(probe, version)

    def record_matrices(self, probe: Recorder | Kept, version: int) -> None:
        """Record the live matrices by their published names, on rank 0, and their factor."""
        record_tensors(probe, LiveAdapterMatrix, self.matrices().items(), version)
        scaling = real(lora_megatron.scaling_of(self._trainer))
        if self._rank == 0:
            probe.emit(LiveAdapterScaling(name="alpha / rank", version=version, scaling=scaling))

    def record_exported(self, probe: Recorder, version: int) -> None:
        """Record what ranks hold after an export."""
        with params_synced(self._trainer):
            self.base.record(probe, version, ShardAfterExport)
            self.trained.record(probe, version, ShardAfterExport)

    def export(self) -> dict[str, torch.Tensor]:
        """Matrices by published name, as megatron-bridge exports them."""
        return lora_megatron.export_adapter(self._trainer)

    def save(self, path: Path, probe: Recorder | None, version: int) -> dict[str, torch.Tensor]:
        """Export the adapter by megatron-bridge and write it, on rank 0, in the format of the peft library.

        Args:
            path: of the folder, replaced if it exists.
            probe: records what a reader finds there; None records nothing.
            version: of the weights.

        Returns:
            Matrices by published name, as they were exported.
        """
        adapter = self.export()
        if self._rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            lora_megatron.save_adapter(path, adapter, self.lora)
            if probe is not None:
                record_exported_adapter(probe, path, version)
        return adapter


class Kept:
    """Records that are made once and written to several traces."""

    def __init__(self) -> None:
        self._records: list[Any] = []

    def emit(self, record: Any, array: object = None) -> None:
        """Keep a record."""
        self._records.append(record)

    def record(self, probe: Recorder, **changed: Any) -> None:
        """Write them to a trace, with other values of some fields."""
        for item in self._records:
            probe.emit(replace(item, **changed))

    def hand_over(self, probe: Recorder) -> None:
        """Write them to a trace and forget them."""
        self.record(probe)
        self._records.clear()
