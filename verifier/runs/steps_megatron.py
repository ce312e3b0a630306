"""Updates of a run's weights, on this rank: optimizer steps, or noise on every tensor."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verifier.data.rollout import Rollout
from verifier.errors import UsageError
from verifier.export.live_weights import LiveWeights
from verifier.launch.child import give_memory_back
from verifier.megatron import optimizer_megatron, step_megatron
from verifier.megatron.checkpoint_megatron import Writer, load
from verifier.megatron.step_megatron import StepResult
from verifier.model.checkpoint import Checkpoint
from verifier.model.provider_megatron import TrainerModel
from verifier.stages.train.records import OptimizerRule

RELATIVE_SIZE = 0.05


class Steps:
    """Steps one after another, each at the rates that the scheduler left behind; `rule` has rates and clipping."""

    def __init__(self, trainer: TrainerModel, rule: OptimizerRule, micro_batch_size: int) -> None:
        self._trainer, self._rule, self._micro_batch_size = trainer, rule, micro_batch_size
        self._begin()

    def _begin(self) -> None:
        optimizer_megatron.forget_optimizer(self._trainer)
        self._optimizer = optimizer_megatron.make_optimizer(self._trainer, rule=self._rule)
        self._scheduler = optimizer_megatron.make_scheduler(self._optimizer, self._rule)

    def take(self, rollouts: Sequence[Rollout], **options: Any) -> StepResult:
        """One step; see `train_step` for the options. A collective."""
        return step_megatron.train_step(
            self._trainer, self._optimizer, rollouts, scheduler=self._scheduler,
            micro_batch_size=self._micro_batch_size, **options,
        )  # fmt: skip

    def resume(self, folder: Path) -> None:
        """Go on from a checkpoint in an empty folder by an optimizer made anew, as a stopped run does. A collective."""
        Writer(self._trainer, self._optimizer, self._scheduler, asynchronous=False).begin(folder)
        del self._optimizer, self._scheduler
        self._begin()
        load(self._trainer, self._optimizer, self._scheduler, folder, same_mesh=True)
        give_memory_back()


def move(live: LiveWeights, source: Checkpoint, seed: str) -> None:
    """Make every live tensor of a rank what the source holds there, moved: the same on every rank and machine.

    Raises:
        UsageError: a model without a layout, of which nobody says what is where.
    """
    if not live.places:
        raise UsageError("--update noise needs a model with a layout, and there is none; use --update step")
    for chunk, name, tensor in live.tensors():
        whole = live.places[chunk, name].shard(lambda tensor_name: _moved(source.read(tensor_name), tensor_name, seed))
        tensor.copy_(whole.to(tensor.device))


def _moved(tensor: torch.Tensor, name: str, seed: str) -> torch.Tensor:
    """Every element times ``1 + 0.05 u``, u uniform in [-1, 1) from a stream keyed by name and seed; integers stay."""
    if not tensor.is_floating_point():
        return tensor
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=16).digest(), "little")
    raw = np.random.Philox(key=key).random_raw(tensor.numel())
    unit = (raw >> np.uint64(40)).astype(np.float64) / 2.0**23 - 1.0
    factor = torch.from_numpy(1.0 + RELATIVE_SIZE * unit).view(tensor.shape)
    return (tensor.double() * factor).to(tensor.dtype)
