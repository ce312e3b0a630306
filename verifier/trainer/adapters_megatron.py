"""Adapters of a training run, on one rank: the frozen base and the matrices that are trained."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
import torch.distributed as dist

from verifier.config.lora import LoraOptions
from verifier.export.adapters import adapters_of, in_adapter, in_base
from verifier.export.live_weights import LiveWeights
from verifier.export.names import layout_of
from verifier.model.checkpoint import Checkpoint
from verifier.model.provider_megatron import TrainerModel
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
) -> Iterator[tuple[str, torch.Tensor]]:  # fmt: skip
    """On rank 0, tensors of all ranks by checkpoint name, joined by the layout without Megatron-Bridge. A collective.

    Args:
        live: whose layout names them.
        tensors: (chunk, local name, contents).
        folder: for shards, the same for all ranks; rank 0 removes it when it has read all.
        rank: this one.
        gradients: see `LiveWeights.join`.
    """
    if rank == 0:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    dist.barrier()
    live.dump(folder, tensors)
    dist.barrier()
    return _read(live, folder, gradients=gradients) if rank == 0 else iter(())


def _read(live: LiveWeights, folder: Path, *, gradients: bool) -> Iterator[tuple[str, torch.Tensor]]:
    yield from live.join(folder, gradients=gradients)
    shutil.rmtree(folder)


class Adapters:
    """The two parts of a model with adapters. Methods are collectives.

    Args:
        trainer: built with `lora_megatron.attach`.
        source: checkpoint of the base.
        lora: what was attached.
        rank: this one.
        folder: of the run's adapters, the same for all ranks.

    Attributes:
        lora: what was attached.
        base: tensors that no step changes, under the names that they have without adapters.
        trained: matrices of the adapters.
    """

    def __init__(self, trainer: TrainerModel, source: Checkpoint, lora: LoraSpec, rank: int, folder: Path) -> None:
        base, mesh = layout_of(source.config), trainer.mesh
        self.lora, self._trainer, self._rank, self._folder = lora, trainer, rank, folder
        self._layout = None if base is None else adapters_of(base, lora.targets, lora.rank)
        self.base = LiveWeights(trainer.chunks, base, mesh, rank, in_base)
        self.trained = LiveWeights(trainer.chunks, self._layout, mesh, rank, in_adapter)

    def published(self, matrices: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Joined matrices under each of their published names; none of a family without a layout."""
        return {} if self._layout is None else dict(self._layout.spread(matrices))

    def matrices(self) -> dict[str, torch.Tensor]:
        """On rank 0, the live matrices under each of their published names, joined by the layout."""
        with params_synced(self._trainer):
            found = joined(self.trained, self.trained.tensors(), self._folder / "shards", self._rank)
        return self.published(dict(found))

    def export(self) -> dict[str, torch.Tensor]:
        """Matrices by published name, as megatron-bridge exports them."""
        return lora_megatron.export_adapter(self._trainer)

    def save(self, path: Path) -> dict[str, torch.Tensor]:
        """Export the adapter by megatron-bridge and write it, on rank 0, in the format of the peft library.

        Args:
            path: of the folder, replaced if it exists.

        Returns:
            Matrices by published name, as they were exported.
        """
        adapter = self.export()
        if self._rank == 0:
            shutil.rmtree(path, ignore_errors=True)
            path.parent.mkdir(parents=True, exist_ok=True)
            lora_megatron.save_adapter(path, adapter, self.lora)
        return adapter
