"""Evidence of one update on one rank: what the optimizer and the scheduler did, the loss's rows, its ratios."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from verifier.config.training import TrainConfig
from verifier.core.record import real
from verifier.core.records_policy import LossRows, UpdateRatios
from verifier.core.records_trainer import ParameterGroup, TrainerStep
from verifier.core.records_weights import StepReport
from verifier.core.store import Recorder
from verifier.model.provider_megatron import TrainerModel
from verifier.probes.adapter_scales_megatron import adapter_scales
from verifier.probes.arguments_megatron import given_arguments
from verifier.probes.balance_megatron import router_balance
from verifier.probes.logit_spreads_megatron import logit_spreads
from verifier.probes.router_losses_megatron import router_losses
from verifier.train import optimizer_megatron
from verifier.train.policy_loss_megatron import LossMeter
from verifier.train.step_megatron import StepResult
from verifier.trainer.oracle_scores import save_scores, tells_scores
from verifier.trainer.step_trace import compares_products, has_router_losses


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRecords:
    """Records of one update.

    Args:
        probe: this rank's recorder of the step's trace.
        config: of the run.
        step: of the run, from 1.
        number: of the optimizer step, from 1.
    """

    probe: Recorder
    config: TrainConfig
    step: int
    number: int

    @property
    def name(self) -> str:
        """Name of the records."""
        return f"update {self.number}"

    def record_step(
        self, result: StepResult, optimizer: Any, scheduler: Any, *, groups: Sequence[ParameterGroup], sampled: bool
    ) -> None:
        """Record counters, rates and the loss.

        Args:
            result: of the step.
            optimizer: after the step.
            scheduler: after the step.
            groups: of parameters, as they were in the step.
            sampled: transformers computes the step too.
        """
        told = {"loss": real(result.loss), "num_tokens": result.num_tokens, "grad_norm": real(result.grad_norm)}
        self.probe.emit(
            TrainerStep(
                name=self.name, version=self.step, step=self.number,
                learning_rate=max((item.learning_rate for item in groups), key=float),
                weight_decay=max((item.weight_decay for item in groups), key=float),
                groups=tuple(item for item in groups if item.vectors or item.others),
                optimizer_steps=optimizer_megatron.steps_of(optimizer), scheduler_steps=int(scheduler.num_steps),
                **told,
            )
        )  # fmt: skip
        if sampled:
            self.probe.emit(StepReport(name=self.name, version=self.step, update=self.number, **told))

    def record_rows(self, meter: LossMeter, coordinate: str, oracle: str | None) -> None:
        """Record the loss's inputs and outputs of this rank's tokens, if it has any.

        Args:
            meter: of the update.
            coordinate: of the rank.
            oracle: folder of a step that transformers computes too, which is told the log-probabilities.
        """
        if rows := meter.rows():
            self.probe.emit(LossRows(name=self.name, version=self.step, coordinate=coordinate), rows)
            if oracle is not None and tells_scores(self.config):
                save_scores(Path(oracle), self.number, coordinate, rows)

    def record_ratios(self, facts: Mapping[str, float], *, first: bool) -> None:
        """Record the ratios of a policy-gradient update, whose weights are those of `old` if it is the first."""
        self.probe.emit(
            UpdateRatios(
                name=self.name, version=self.step, update=self.number, first=first, at_reference=self.number == 1,
                ratio_over=self.config.grpo.ratio_over, ratio_gap=real(facts["ratio_gap"]),
                kl_gap=real(facts["kl_gap"]), clipped=int(facts["clipped"]), clamped=int(facts["clamped"]),
            )
        )  # fmt: skip


@contextlib.contextmanager
def watched(probe: Recorder, trainer: TrainerModel, config: TrainConfig, name: str, version: int) -> Iterator[None]:
    """Record what an update's passes are told, what routers add to it by themselves, and how adapters are scaled.

    Args:
        probe: this rank's recorder of the step's trace.
        trainer: the model.
        config: of the run.
        name: of the update, as its records have it.
        version: of the weights.
    """
    rate, lora = config.megatron.moe_bias_update_rate, config.lora
    with contextlib.ExitStack() as stack:
        stack.enter_context(given_arguments(probe, trainer, name, version))
        stack.enter_context(router_balance(probe, trainer, name, version, rate=rate))
        if has_router_losses(config):
            stack.enter_context(router_losses(probe, trainer, name, version))
        if compares_products(trainer.tier):
            grpo = config.grpo if config.algorithm == "grpo" else None
            temperature, spread = (grpo.temperature, bool(grpo.entropy_weight)) if grpo else (1.0, False)
            looked = logit_spreads(probe, trainer, name, version, temperature=temperature, spread=spread)
            stack.enter_context(looked)
        if lora.rank:
            asked = lora.effective_alpha / lora.rank
            stack.enter_context(adapter_scales(probe, trainer, name, version, asked=asked))
        yield
