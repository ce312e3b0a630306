"""The last export of a training run, on one rank: the files that it leaves, and the evidence of what is in them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from verifier.core.record import real
from verifier.core.records_weights import (
    LiveAdapterMatrix,
    LiveAdapterScaling,
    UpdatedShard,
    WrittenShard,
)
from verifier.core.store import Recorder
from verifier.export import gather_megatron
from verifier.model.checkpoint import INDEX, Checkpoint
from verifier.model.provider_megatron import TrainerModel
from verifier.probes.configs_megatron import record_config
from verifier.probes.weights_megatron import LiveWeights, described, record_saved, record_tensors, source_tensors
from verifier.train import lora_megatron
from verifier.train.step_megatron import params_synced
from verifier.trainer.adapters_megatron import Adapters, Kept
from verifier.trainer.merge_rounding import MergeRounding

if TYPE_CHECKING:
    import torch


class FinalExport:
    """Writer of the trained weights. Every method is a collective.

    Args:
        trainer: whose weights are written.
        source: checkpoint that it began with.
        live: all weights of the trainer.
        adapters: of the trainer, which are merged into the weights and written alone, too; None for none.
        rank: this one.
        version: of the weights.
    """

    def __init__(
        self, trainer: TrainerModel, source: Checkpoint, live: LiveWeights, adapters: Adapters | None, rank: int,
        version: int,
    ) -> None:  # fmt: skip
        self._trainer, self._source, self._live, self._adapters = trainer, source, live, adapters
        self._rank, self._version = rank, version

    def write(self, folder: Path, adapter: Path, probe: Recorder | None, left: Kept | None) -> None:
        """Write the checkpoint and, of a trainer with adapters, the adapter.

        Args:
            folder: of the checkpoint.
            adapter: folder of the adapter.
            probe: this rank's recorder of the export's trace; None records nothing.
            left: shards as the last update left them; None where they are not known, and are looked at now.
        """
        matrices = {} if probe is None else self._record_live(probe, left)
        gather_megatron.save(self._trainer, folder, whole=True)
        if self._adapters is not None:
            self._adapters.save(adapter, probe, self._version)
        dist.barrier()
        if probe is not None:
            self._record_files(probe, folder, matrices)

    def _record_live(self, probe: Recorder, left: Kept | None) -> dict[str, torch.Tensor]:
        """Record what should be written; return the matrices of adapters, on rank 0."""
        version = self._version
        if self._adapters is None:
            if left is None:
                left = Kept()
                with params_synced(self._trainer):
                    self._live.record(left, version, UpdatedShard)
            left.record(probe, version=version)
            return {}
        matrices, scaling = self._adapters.matrices(), real(lora_megatron.scaling_of(self._trainer))
        record_tensors(probe, LiveAdapterMatrix, matrices.items(), version)
        if self._rank == 0:
            probe.emit(LiveAdapterScaling(name="alpha / rank", version=version, scaling=scaling))
        return matrices

    def _record_files(self, probe: Recorder, folder: Path, matrices: dict[str, torch.Tensor]) -> None:
        """Record what a reader finds in the files: of all tensors on rank 0, and of its own shards on each rank."""
        files = _Files(folder)
        if self._rank == 0:
            record_config(probe, self._source, folder, self._version)
            record_saved(probe, folder, self._version)
            described_by_layout = self._live.described()
            for item in source_tensors(self._source):
                if item.name in files.names or not described_by_layout or item.name in described_by_layout:
                    probe.emit(item)
        if self._adapters is not None and self._rank == 0:
            rounding = MergeRounding(self._source, matrices, self._adapters.lora)
            for name in sorted(files.names):
                if (record := rounding.add(name, files.read(name), self._version)) is not None:
                    probe.emit(record)
        for place in self._live.places.values() if self._adapters is None else ():
            if all(name in files.names for name in place.sources):
                shapes = {name: tuple(files.read(name).shape) for name in place.sources}
                if shapes != {name: tuple(place.source_shapes[name]) for name in place.sources}:
                    continue  # the comparison with the source names it
                probe.emit(
                    WrittenShard(
                        name=place.global_name, version=self._version, coordinate=str(self._at), sources=place.sources,
                        **described(place.shard(files.read)),
                    )
                )  # fmt: skip

    @property
    def _at(self) -> object:
        return self._trainer.mesh.coordinate(self._rank)


class _Files:
    """Tensors in the files of a checkpoint, where its index says that they are.

    Attributes:
        names: of the tensors that are there.
    """

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        index = folder / INDEX
        listed = json.loads(index.read_text())["weight_map"] if index.is_file() else {}
        self._held = {}
        for path in sorted(folder.glob("*.safetensors")):
            file = safe_open(path, framework="pt", device="cpu")
            for name in file.keys():  # noqa: SIM118 - no mapping
                if not listed or listed.get(name) == path.name:
                    self._held[name] = file
        self.names = frozenset(self._held)

    def read(self, name: str) -> torch.Tensor:
        """A tensor by name."""
        tensor: torch.Tensor = self._held[name].get_tensor(name)
        return tensor
