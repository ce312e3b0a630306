"""Evidence of one update on one rank: its batch, the loss's rows, and what optimizer and scheduler did."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from verifier.config.training import TrainConfig
from verifier.core.outputs import full_disk_refused
from verifier.core.record import real
from verifier.core.store import Recorder
from verifier.data.rollout import Rollout
from verifier.model.provider_megatron import TrainerModel
from verifier.probes.training.step_trace import can_audit, compares_products, has_router_losses
from verifier.stages.load.probe_configs_megatron import record_provider, record_stated
from verifier.stages.load.records import KnobsReached
from verifier.stages.logprob.probe_adapter_scales_megatron import adapter_scales
from verifier.stages.logprob.probe_arguments_megatron import given_arguments
from verifier.stages.logprob.probe_oracle_scores import save_scores, tells_scores
from verifier.stages.loss.probe_logit_spreads_megatron import logit_spreads
from verifier.stages.loss.probe_router_losses_megatron import router_losses
from verifier.stages.loss.records import LossRows, UpdateRatios
from verifier.stages.pack.probe_tokens import TokenProbe
from verifier.stages.train.probe_adam_audit_megatron import groups_of
from verifier.stages.train.probe_balance_megatron import router_balance
from verifier.stages.train.probe_hand_on_megatron import HandOn
from verifier.stages.train.records import ParameterGroup, StepReport, TrainerStep
from verifier.train import optimizer_megatron
from verifier.train.pack import PackedBatch
from verifier.train.policy_loss_megatron import LossMeter
from verifier.train.router_replay_megatron import RouterWatch
from verifier.train.step_megatron import StepResult
from verifier.trainer.observer import SomeRollouts, Update, UpdateObserver

if TYPE_CHECKING:
    from verifier.probes.training.rank_evidence_megatron import RankEvidence


class UpdateEvidence(UpdateObserver):
    """Records of one update. The constructor looks at the rank before the passes.

    Args:
        rank: observer of the rank.
        update: the step.
        probe: this rank's recorder of the step's trace.
        hand_on: writer for the oracle; None for a step that it skips.
        oracle: folder in which the oracle finds gradients, weights and moments; None likewise.
    """

    keeps_rows = True

    def __init__(
        self, rank: RankEvidence, update: Update, probe: Recorder, hand_on: HandOn | None, oracle: Path | None
    ) -> None:
        parts = rank.parts
        self._rank, self._parts, self._update, self._probe = rank, parts, update, probe
        self._hand_on, self._oracle, self._config = hand_on, oracle, parts.config
        self._name, self._version, at = update.name, update.step, rank.at
        self._look = TokenProbe(probe, parts.config.mesh, parts.rank, self._name, update.step, update.rollouts)
        self._groups: Sequence[ParameterGroup] = groups_of(parts.optimizer, known=can_audit(parts.config))
        self._audit = rank.audits.of(update.number, self._name) if can_audit(parts.config) else None
        self._watch: RouterWatch | None = None
        self._some: Sequence[int] | None = (update.note or {}).get("rollouts", {}).get(str(update.number))
        self._told: dict[str, Any] = {}
        if update.first and at.tp == at.cp == at.dp == 0:  # one rank of each pipeline stage
            record_provider(probe, parts.trainer.provider, parts.trainer.chunks)
        if update.first and parts.rank == 0:
            record_stated(probe, parts.source)

    @contextlib.contextmanager
    def passes(self) -> Iterator[None]:
        """Watch what the passes are told, and what routers choose by themselves: the oracle takes the same experts."""
        with contextlib.ExitStack() as stack:
            stack.enter_context(watched(self._probe, self._parts.trainer, self._config, self._name, self._version))
            if self._some is None:
                self._watch = stack.enter_context(self._routed(self._update.rollouts))
            yield

    def before_passes(self, compute: SomeRollouts) -> None:
        """Hand on what the trainer makes of the rollouts that the oracle computes, where these are not all."""
        if self._some is None or self._hand_on is None:
            return
        with self._routed([self._update.rollouts[at] for at in self._some]) as watch:
            look = (lambda shards: None) if watch is None else watch.on_shards
            loss, num_tokens, rows = compute(self._some, look)
        self._hand_on.gradients(self._update.number, "sampled")
        self._told = {"loss": real(loss), "num_tokens": num_tokens}
        self._tell_scores(rows)

    @contextlib.contextmanager
    def _routed(self, rollouts: Sequence[Rollout]) -> Iterator[RouterWatch | None]:
        routing, oracle = self._rank.routing, self._oracle
        if routing is None or oracle is None:
            yield None
            return
        with RouterWatch(routing, rollouts) as watch:
            yield watch
        file = oracle / f"routes-{self._update.number}" / f"{self._parts.rank:04d}.npy"
        with full_disk_refused(file):
            file.parent.mkdir(exist_ok=True)
            np.save(file, watch.choices())

    def on_batch(self, shards: list[PackedBatch]) -> Callable[[], None] | None:
        """Look at micro-batches, and at what the step begins with."""
        if self._watch is not None:
            self._watch.on_shards(shards)
        if self._audit is not None:
            self._audit.begin()
        return self._look(shards)

    def on_gradients(self) -> None:
        """Hand on gradients, and keep some."""
        if self._hand_on is not None:
            self._hand_on.gradients(self._update.number)
        if self._audit is not None:
            self._audit.gradients()

    def on_optimizer_step(self, result: StepResult, meter: LossMeter, metrics: Mapping[str, float]) -> None:
        """Record what the step made."""
        rank, parts, update, probe = self._rank, self._parts, self._update, self._probe
        if self._hand_on is not None:
            self._hand_on.after(update.number, probe if update.last and rank.connected else None, update.step)
        rank.record_routes(probe, update.step, update.batch)
        probe.emit(KnobsReached(name=self._name, version=self._version, values=dict(parts.knobs())))
        self._record_step(result)
        if self._audit is not None:
            self._audit.record(probe, update.step, result.grad_norm, str(rank.at))
        if rank.at.tp == 0:
            self._record_rows(meter)
        if self._config.algorithm == "grpo":
            rank.record_passes(probe, update.step)
            self._record_ratios(metrics)
        if update.last:
            rank.record_weights(probe, update.step, update.number + 1)
            if not rank.connected:
                rank.close()

    def _record_step(self, result: StepResult) -> None:
        """Record counters, rates and the loss."""
        told = {"loss": real(result.loss), "num_tokens": result.num_tokens, "grad_norm": real(result.grad_norm)}
        self._probe.emit(
            TrainerStep(
                name=self._name, version=self._version, step=self._update.number,
                learning_rate=max((item.learning_rate for item in self._groups), key=float),
                weight_decay=max((item.weight_decay for item in self._groups), key=float),
                groups=tuple(item for item in self._groups if item.vectors or item.others),
                optimizer_steps=optimizer_megatron.steps_of(self._parts.optimizer),
                scheduler_steps=int(self._parts.scheduler.num_steps), **told,
            )
        )  # fmt: skip
        if self._hand_on is not None:
            told |= self._told
            self._probe.emit(StepReport(name=self._name, version=self._version, update=self._update.number, **told))

    def _record_rows(self, meter: LossMeter) -> None:
        """Record the loss's inputs and outputs of this rank's tokens, if it has any, and tell the oracle of them."""
        coordinate = str(self._rank.at)
        if rows := meter.rows():
            self._probe.emit(LossRows(name=self._name, version=self._version, coordinate=coordinate), rows)
            if self._some is None:
                self._tell_scores(rows)

    def _tell_scores(self, rows: Mapping[str, np.ndarray]) -> None:
        if rows and self._rank.at.tp == 0 and self._oracle is not None and tells_scores(self._config):
            save_scores(self._oracle, self._update.number, str(self._rank.at), rows)

    def _record_ratios(self, metrics: Mapping[str, float]) -> None:
        """Record the ratios of a policy-gradient update, whose weights are those of `old` if it is the first."""
        self._probe.emit(
            UpdateRatios(
                name=self._name, version=self._version, update=self._update.number, first=self._update.first,
                at_reference=self._update.number == 1, ratio_over=self._config.grpo.ratio_over,
                ratio_gap=real(metrics["ratio_gap"]), kl_gap=real(metrics["kl_gap"]), clipped=int(metrics["clipped"]),
                clamped=int(metrics["clamped"]),
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
