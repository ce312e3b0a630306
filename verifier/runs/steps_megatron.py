"""The training steps of a run, on this rank: the optimizer and the scheduler that take them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verifier.core.record import Probe
from verifier.data.rollout import Rollout
from verifier.model.provider_megatron import TrainerModel
from verifier.probes.trainer import record_objective, record_rule
from verifier.runs.scenario import CLIP_GRAD, DRIFT_WEIGHT, ENTROPY_WEIGHT, MICRO_BATCH, RATES, TEMPERATURE
from verifier.train import optimizer_megatron, step_megatron
from verifier.train.step_megatron import StepResult


class Steps:
    """Steps one after another, each at the rates that the scheduler left behind.

    Args:
        trainer: built with `data_parallel`.
        rates: as `make_scheduler` takes them.
    """

    def __init__(self, trainer: TrainerModel, rates: Mapping[str, float] = RATES) -> None:
        self._trainer, self._rates = trainer, rates
        self._begin()

    def _begin(self) -> None:
        self._optimizer = optimizer_megatron.make_optimizer(
            self._trainer, learning_rate=self._rates["learning_rate"], clip_grad=CLIP_GRAD
        )
        self._scheduler = optimizer_megatron.make_scheduler(self._optimizer, **self._rates)

    def take(self, rollouts: Sequence[Rollout], **options: Any) -> StepResult:
        """One step; see `train_step` for the options. A collective."""
        return step_megatron.train_step(
            self._trainer, self._optimizer, rollouts, scheduler=self._scheduler, micro_batch_size=MICRO_BATCH, **options
        )

    def idle(self, rollouts: Sequence[Rollout]) -> None:
        """A step of learning rate 0. A collective."""
        step_megatron.train_step(
            self._trainer, self._optimizer, rollouts, learning_rate=0.0, micro_batch_size=MICRO_BATCH
        )

    def resume(self, folder: Path) -> None:
        """Go on as a run does that was stopped: with what was written, in an optimizer made anew. A collective.

        Args:
            folder: an empty one, the same for all ranks.
        """
        optimizer_megatron.save(self._optimizer, self._scheduler, folder)
        self._begin()
        optimizer_megatron.load(self._optimizer, self._scheduler, folder)


def record_rules(probe: Probe, rates: Mapping[str, float] = RATES) -> None:
    """Rule of every step of a run, for those who compute it again."""
    record_rule(probe, rates, clip_grad=CLIP_GRAD)
    record_objective(probe, temperature=TEMPERATURE, entropy_weight=ENTROPY_WEIGHT, drift_weight=DRIFT_WEIGHT)
