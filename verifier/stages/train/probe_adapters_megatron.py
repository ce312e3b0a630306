"""Evidence of a trainer with adapters, on one rank: as they were attached, after each update, after an export."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from verifier.core.record import Probe, real
from verifier.model.provider_megatron import TrainerModel
from verifier.probes.training.kept_records import Kept
from verifier.stages.export.probe_tensors import record_tensors
from verifier.stages.export.records import ShardAfterExport
from verifier.stages.load.probe_weights_megatron import record_live
from verifier.stages.load.records import AdapterShard, AdapterSpread, LoadedShard
from verifier.stages.train.records import FrozenShard, LiveAdapterMatrix, LiveAdapterScaling, UpdatedShard
from verifier.train import lora_megatron
from verifier.train.step_megatron import params_synced
from verifier.trainer.adapters_megatron import Adapters


class AdapterEvidence:
    """Base and adapters, as they were attached and as they are. Methods are collectives, as the constructor is.

    Args:
        trainer: of the rank, with adapters that no step has moved.
        adapters: of the trainer.
        rank: this one.
    """

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
