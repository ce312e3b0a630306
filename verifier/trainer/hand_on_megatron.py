"""Gradients, weights and moments of an update, joined from all ranks for the oracle."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from verifier.export.save import save_checkpoint
from verifier.model.checkpoint import Checkpoint
from verifier.model.provider_megatron import TrainerModel
from verifier.probes.weights_megatron import LiveWeights
from verifier.train.optimizer_megatron import named_gradients, named_states
from verifier.train.step_megatron import params_synced


class HandOn:
    """Writer of what `verifier.oracle.policy_hf` reads, as checkpoint directories. Every method is a collective.

    Args:
        trainer: built with a distributed optimizer.
        optimizer: whose moments are handed on.
        live: weights of the trainer, of a family with a layout.
        rank: this rank; rank 0 joins the shards of all.
        folder: for the step, the same for all ranks.
        source: whose config.json goes with the tensors.
    """

    def __init__(
        self, trainer: TrainerModel, optimizer: Any, live: LiveWeights, rank: int, folder: Path, source: Checkpoint
    ) -> None:
        self._trainer, self._optimizer, self._live, self._rank = trainer, optimizer, live, rank
        self._folder, self._source = folder, source

    def before(self, number: int, *, first: bool) -> None:
        """Hand on what an update begins with; its weights are those that the update before it left, if it had one."""
        if first:
            self._weights(number - 1)
        rounded = ["master"] if self._trainer.provider.bf16 else []
        for part in ("exp_avg", "exp_avg_sq", *rounded):
            self._save(f"{part}-{number}", named_states(self._trainer, self._optimizer, part))

    def gradients(self, number: int) -> None:
        """Hand on reduced gradients, between backward pass and step."""
        self._save(f"gradients-{number}", named_gradients(self._trainer))

    def after(self, number: int) -> None:
        """Hand on what an update made."""
        self._weights(number)

    def _weights(self, number: int) -> None:
        with params_synced(self._trainer):
            self._save(f"weights-{number}", self._live.tensors())

    def _save(self, name: str, tensors: Iterable[tuple[int, str, torch.Tensor]]) -> None:
        """Join tensors of all ranks by the layout, not by Megatron-Bridge, and write them."""
        shards = self._folder / f"{name}-shards"
        if self._rank == 0:
            shards.mkdir(parents=True)
        dist.barrier()
        self._live.dump(shards, tensors)
        dist.barrier()
        if self._rank == 0:
            save_checkpoint(self._folder / name, self._source.config, self._live.join(shards).items())
            shutil.rmtree(shards)
