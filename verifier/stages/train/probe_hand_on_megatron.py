"""Gradients, weights and moments of an update, joined from all ranks for the oracle."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from verifier.core.record import Probe
from verifier.export.live_weights import LiveWeights
from verifier.export.save import save_checkpoint
from verifier.model.checkpoint import Checkpoint, open_checkpoint
from verifier.model.provider_megatron import TrainerModel
from verifier.stages.export.probe_tensors import record_tensors
from verifier.stages.train.records import JoinedTensor
from verifier.train import lora_megatron
from verifier.train.optimizer_megatron import named_gradients, named_states
from verifier.train.step_megatron import params_synced
from verifier.trainer.adapters_megatron import Adapters, joined


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
        if adapters is not None:
            found = self.matrices(number)
            if self._rank == 0:
                added = lora_megatron.merged(self._source, found, adapters.lora.scaling)
                save_checkpoint(self._folder / name, self._source.config, added)
            return found
        with params_synced(self._trainer):
            found = self._save(name, self._live.tensors())
        if probe is not None and self._rank == 0:
            record_tensors(probe, JoinedTensor, found.items(), version)
        return found

    def matrices(self, number: int) -> dict[str, torch.Tensor]:
        """Hand on the matrices of adapters; rank 0 returns them by published name."""
        assert self._adapters is not None
        with params_synced(self._trainer):
            return self._adapters.published(self._save(f"matrices-{number}", self._live.tensors()))

    def _save(
        self, name: str, tensors: Iterable[tuple[int, str, torch.Tensor]], *, gradients: bool = False
    ) -> dict[str, torch.Tensor]:
        """Join tensors of all ranks, values or gradients by them, into files, which rank 0 maps."""
        whole = joined(self._live, tensors, self._folder / f"{name}-shards", self._rank, gradients=gradients)
        if self._rank:
            return {}
        written = open_checkpoint(save_checkpoint(self._folder / name, self._source.config, whole))
        return {each: written.read(each) for each in written.names()}
