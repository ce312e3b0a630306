"""The training steps of a run, on this rank: the optimizer and the scheduler that take them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verifier.core.records_weights import OptimizerRule
from verifier.data.rollout import Rollout
from verifier.model.provider_megatron import TrainerModel
from verifier.train import optimizer_megatron, step_megatron
from verifier.train.step_megatron import StepResult


class Steps:
    """Steps one after another, each at the rates that the scheduler left behind.

    Args:
        trainer: built with `data_parallel`.
        rule: rates and clipping.
        micro_batch_size: rollouts per packed micro-batch at the most.
    """

    def __init__(self, trainer: TrainerModel, rule: OptimizerRule, micro_batch_size: int) -> None:
        self._trainer, self._rule, self._micro_batch_size = trainer, rule, micro_batch_size
        self._begin()

    def _begin(self) -> None:
        rule = self._rule
        self._optimizer = optimizer_megatron.make_optimizer(
            self._trainer, learning_rate=rule.learning_rate, clip_grad=rule.clip_grad
        )
        self._scheduler = optimizer_megatron.make_scheduler(
            self._optimizer, learning_rate=rule.learning_rate, least_learning_rate=rule.least_learning_rate,
            weight_decay=rule.weight_decay, greatest_weight_decay=rule.greatest_weight_decay, num_steps=rule.num_steps,
        )  # fmt: skip

    def take(self, rollouts: Sequence[Rollout], **options: Any) -> StepResult:
        """One step; see `train_step` for the options. A collective."""
        return step_megatron.train_step(
            self._trainer, self._optimizer, rollouts, scheduler=self._scheduler,
            micro_batch_size=self._micro_batch_size, **options,
        )  # fmt: skip

    def idle(self, rollouts: Sequence[Rollout]) -> None:
        """A step of learning rate 0. A collective."""
        step_megatron.train_step(
            self._trainer, self._optimizer, rollouts, learning_rate=0.0, micro_batch_size=self._micro_batch_size
        )

    def resume(self, folder: Path) -> None:
        """Go on as a run does that was stopped: with what was written, in an optimizer made anew. A collective.

        Args:
            folder: an empty one, the same for all ranks.
        """
        optimizer_megatron.save(self._optimizer, self._scheduler, folder)
        self._begin()
        optimizer_megatron.load(self._optimizer, self._scheduler, folder)
