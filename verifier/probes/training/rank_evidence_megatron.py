"""Observer of one rank of a judged training run: what it loads, scores, steps, sends, saves and exports."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from verifier.config.training import TrainConfig
from verifier.core.outputs import full_disk_refused
from verifier.core.record import Probe, real
from verifier.core.store import Recorder
from verifier.data.rollout import Rollout
from verifier.engine.client import EngineClient, EngineGone
from verifier.export import gather_megatron
from verifier.megatron import optimizer_megatron
from verifier.megatron.pack import PackedBatch
from verifier.megatron.policy_loss_megatron import LossMeter
from verifier.megatron.router_replay_megatron import RouterWatch, Routing
from verifier.megatron.step_megatron import OnRows, StepResult, params_synced
from verifier.megatron.written_megatron import Stepped
from verifier.model.families import served
from verifier.model.provider_megatron import TrainerModel
from verifier.probes.training.kept_records import Kept
from verifier.probes.training.step_trace import can_audit, cuts_exports, has_router_losses
from verifier.stages.checkpoint.probe_loaded_state_megatron import record_facts, record_loaded
from verifier.stages.checkpoint.records import LoadedState, SavedState
from verifier.stages.engine.probe_engine_state import HeldEngine, record_held
from verifier.stages.export.probe_live_weights_megatron import record_files, record_live_weights
from verifier.stages.export.probe_tensors import source_tensors
from verifier.stages.load.probe_configs_megatron import record_live, record_provider, record_stated
from verifier.stages.load.probe_loaded_megatron import record_loaded_weights
from verifier.stages.load.records import KnobsReached, SourceTensor
from verifier.stages.logprob.probe_adapter_scales_megatron import adapter_scales
from verifier.stages.logprob.probe_oracle_scores import save_scores, tells_scores
from verifier.stages.logprob.probe_scoring_passes_megatron import Digests, ScoringPasses, given_arguments, live_digests
from verifier.stages.loss.probe_router_losses_megatron import logit_spreads, router_losses
from verifier.stages.loss.records import LossRows, UpdateRatios
from verifier.stages.pack.probe_tokens import TokenProbe
from verifier.stages.replay.records import UsedRoutes
from verifier.stages.train.probe_adam_audit_megatron import Audits, groups_of
from verifier.stages.train.probe_gradient_products_megatron import compares_products
from verifier.stages.train.probe_hand_on_megatron import AdapterEvidence, HandOn, router_balance
from verifier.stages.train.records import ParameterGroup, StepReport, TrainerStep, UpdatedShard
from verifier.stages.transport.probe_megatron import TransferEvidence, held_adapter
from verifier.trainer.observer import (
    Note,
    RankObserver,
    RankParts,
    SomeRollouts,
    Transfer,
    TransferObserver,
    Update,
    UpdateObserver,
)
from verifier.trainer.state_megatron import Facts, digests_of, elements_of


class RankEvidence(RankObserver):
    """Evidence of one rank, in the traces that the controller's notes name."""

    def __init__(self) -> None:
        self._recorder: Recorder | None = None
        self.adapters: AdapterEvidence | None = None
        self.loaded, self.left = Kept(), Kept()
        """Records for the first judged step; the shards as the last update left them."""
        self.has_left = False
        self._begun: Digests = {}
        self._away: Facts = []
        self._stays: list[tuple[Facts, Facts]] = []
        self._used: list[tuple[str, str, Any]] = []
        self.expected: list[SourceTensor] = []
        self.planned: Path | None = None
        """Trace that has the plan of the weights."""
        self._held: HeldEngine | None = None
        self._client: EngineClient | None = None
        self._sent_first: int | None = None
        self.connected = self.resumed = False

    def on_build(self, parts: RankParts) -> None:
        """Keep the rank's parts, adapters as they were attached, and what a reference is made from."""
        self.parts, config = parts, parts.config
        self.at = config.mesh.coordinate(parts.rank)
        if parts.adapters is not None:
            self.adapters = AdapterEvidence(parts.trainer, parts.adapters, parts.rank)
        self.audits = Audits(parts.trainer, parts.optimizer, parts.settings, parts.live.places, parts.rank)
        self._begun = live_digests(parts.live) if parts.reference() else {}
        self.passes = ScoringPasses(judged=config.algorithm == "grpo")
        routed = bool(parts.trainer.provider.num_moe_experts)
        watches = routed and not config.grpo.replay_routes and config.verify.every != 0
        self.routing = Routing(parts.trainer) if watches else None
        """Routers that choose by themselves, and tell the oracle what."""

    def on_load(self, resume: Path | None, *, same_mesh: bool) -> None:
        """Keep what was saved and what was loaded."""
        parts = self.parts
        saved, self.resumed = Kept(), resume is not None
        if resume is not None:
            self._begun = {}
            lives = [parts.live] if parts.adapters is None else [parts.adapters.base, parts.live]
            held = parts.state()
            elements = elements_of(parts.trainer, parts.optimizer, parts.scheduler, lives, parts.reference())
            record_loaded(saved, resume, parts.rank, str(self.at), held, elements, same_mesh=same_mesh)
        record_loaded_weights(self.loaded, parts, self.adapters, resume)
        saved.record(self.loaded)
        self.frozen = digests_of(parts.reference(), parts.live)

    def record_load(self, trace: str) -> None:
        """Record what was saved and what was loaded, in a trace of its own."""
        with contextlib.closing(self.recorder_of(trace)) as probe:
            self.loaded.hand_over(probe)

    def on_checkpoint(self, optimizer_steps: int) -> Sequence[Stepped]:
        """Elements as the last update left them."""
        return self.audits.stepped(optimizer_steps)

    def on_scores(self, which: str, batch: str, rollouts: Sequence[Rollout]) -> OnRows | None:
        """Keep the pass's rows, and the weights of a reference."""
        return self.passes.begin(which, batch, rollouts, self.parts.live)

    def on_routes(self, batch: str, during: str, watch: RouterWatch) -> None:
        """Keep what replaying routers chose, and chose again in recomputation."""
        self._used.append((batch, during, np.concatenate([watch.choices(), watch.recomputed()])))

    def record_routes(self, probe: Probe, version: int, batch: str) -> None:
        """Record what was used of the mini-batches of a step, named like one of them, and forget all."""
        step = batch.rpartition("-")[0]
        for name, during, choices in self._used:
            if name.rpartition("-")[0] == step:  # others are of steps without an update, which have no trace
                probe.emit(UsedRoutes(name=name, version=version, coordinate=str(self.at), during=during), choices)
        self._used = []

    def on_update(self, update: Update) -> UpdateObserver:
        """Hand on what the oracle needs, and look at the step, if it has a trace."""
        probe = self._shared(update.note)
        oracle = None if update.note is None else update.note.get("oracle")
        hand_on = None
        if oracle is not None:
            hand_on = self._hand_on(oracle)
            joined = probe if self._sent_first == update.step - 1 and self.adapters is None else None
            hand_on.before(update.number, first=update.first, probe=joined, version=update.step - 1)
        if probe is None:
            return UpdateObserver()
        self.loaded.hand_over(probe)
        self._record_stays(probe, update.step)
        return UpdateEvidence(self, update, probe, hand_on, None if oracle is None else Path(oracle))

    def hold(self, version: int, folder: str) -> None:
        """Write the weights as they are, a version, for the oracle of a later step."""
        self._hand_on(folder).after(version)

    def record_passes(self, probe: Probe, version: int) -> None:
        """Record the scoring passes of a step, and what its reference is."""
        self.passes.record(probe, version, self.frozen, self._begun, self.at)
        self._begun = {}

    def record_weights(self, probe: Probe, version: int, number: int) -> None:
        """Record what the last update of a step left, before the update of the next number gathers it."""
        if self.adapters is not None:
            self.adapters.record_update(probe, version)
            return
        self.left, self.has_left = Kept(), True
        with self.audits.left_ungathered(number), params_synced(self.parts.trainer):
            record_live(self.left, self.parts.live, version, UpdatedShard)
        self.left.record(probe)

    def on_connect(self, client: EngineClient | None, *, sleeps: bool) -> None:
        """Look at what engines hold before they are sent anything."""
        self.connected, self._client = True, client
        self._held = None if client is None else HeldEngine(client, sleeps=sleeps)

    def on_transfer(self, transfer: Transfer) -> TransferObserver:
        """Record what is sent, and what arrives."""
        parts, probe = self.parts, self._shared(transfer.note)
        if transfer.first:
            self._sent_first = transfer.version
        done = self.close if not transfer.first else lambda: None
        if transfer.plan is not None and parts.rank == 0 and not self.expected:
            self.expected = list(source_tensors(parts.source))
        cuts = parts.adapters is None and cuts_exports(parts.config, parts.tier, parts.source.num_bytes)
        return TransferEvidence(self, transfer, probe, self._held, done, parts.live if cuts else None)

    def look(self, version: int, trace: str) -> str:
        """Record what engines hold, beside the weights of a version; rank 0 returns why one is gone, empty if not."""
        parts, client = self.parts, self._client
        if parts.adapters is not None and parts.config.lora.sync == "adapter":
            sent = held_adapter(parts, parts.adapters.export()) if client is not None else {}
        else:
            stream = gather_megatron.export(parts.trainer)
            sent = {name: tensor.cpu().clone() for name, tensor in stream if parts.rank == 0}
        if client is not None:
            try:
                record_held(Path(trace), client.checkpoint_view(), served(sent, parts.source.config), version)
            except EngineGone as problem:
                return str(problem)
        return ""

    def on_offload(self) -> None:
        """Digest the state that leaves the GPU."""
        self._away = self.parts.state()

    def on_onload(self) -> None:
        """Digest the state that is back."""
        self._stays.append((self._away, self.parts.state()))

    def _record_stays(self, probe: Probe, version: int) -> None:
        """Record the state before and after each stay on the host that has not been recorded."""
        for number, stay in enumerate(self._stays):
            for kind, facts in zip((SavedState, LoadedState), stay, strict=True):
                named = [{**fact, "name": f"host {number}/{fact['name']}"} for fact in facts]
                record_facts(probe, kind, named, version)
        self._stays = []

    def before_export(self, version: int, note: Note | None) -> None:
        """Record what should be written."""
        self._matrices: Mapping[str, Any] = {}
        if (probe := self._shared(note)) is not None:
            self._matrices = record_live_weights(self, probe, version)

    def on_export(self, version: int, note: Note | None, folder: Path, adapter: Path) -> None:
        """Record what a reader finds."""
        if (probe := self._shared(note)) is not None:
            record_files(self.parts, probe, version, folder, adapter, self._matrices)
        self.close()

    def _hand_on(self, folder: str) -> HandOn:
        parts = self.parts
        return HandOn(
            parts.trainer, parts.optimizer, parts.live, parts.rank, Path(folder), parts.source, parts.adapters,
        )  # fmt: skip

    def _shared(self, note: Note | None) -> Recorder | None:
        """Recorder of a step's trace, which all of its updates and its transfer share."""
        trace = None if note is None else note["trace"]
        if self._recorder is not None and (trace is None or self._recorder.path != Path(trace)):
            self.close()
        if trace is not None and self._recorder is None:
            self._recorder = self.recorder_of(trace)
        return self._recorder

    def recorder_of(self, trace: str) -> Recorder:
        """Recorder of this rank in a trace."""
        return Recorder(Path(trace), "trainer", self.parts.rank)

    def close(self) -> None:
        """End the recorder of the step."""
        if self._recorder is not None:
            self._recorder.close()
            self._recorder = None


class UpdateEvidence(UpdateObserver):
    """Records of one update. The constructor looks at the rank before the passes.

    `hand_on` writes for the oracle, which finds gradients, weights and moments in the folder `oracle`; both are None
    for a step that it skips.
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
            result, rows = compute(self._some, look)
        self._hand_on.gradients(self._update.number, "sampled")
        self._told = _losses_of(result)
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
            if update.last:
                torch.cuda.empty_cache()  # the oracle has this GPU too
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
        grad_norm = real(result.grad_norm)
        self._probe.emit(
            TrainerStep(
                name=self._name, version=self._version, step=self._update.number,
                learning_rate=max((item.learning_rate for item in self._groups), key=float),
                weight_decay=max((item.weight_decay for item in self._groups), key=float),
                groups=tuple(item for item in self._groups if item.vectors or item.others),
                optimizer_steps=optimizer_megatron.steps_of(self._parts.optimizer),
                scheduler_steps=int(self._parts.scheduler.num_steps), loss=real(result.loss),
                num_tokens=result.num_tokens, grad_norm=grad_norm,
            )
        )  # fmt: skip
        if self._hand_on is not None:
            told = {"grad_norm": grad_norm, **(self._told or _losses_of(result))}
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


def _losses_of(result: StepResult) -> dict[str, Any]:
    """Fields of `StepReport` of a step's losses."""
    losses = {"loss": real(result.loss), "num_tokens": result.num_tokens}
    further = {"further_loss": real(result.further_loss), "num_further": result.num_further}
    return losses | further if result.num_further else losses


@contextlib.contextmanager
def watched(probe: Recorder, trainer: TrainerModel, config: TrainConfig, name: str, version: int) -> Iterator[None]:
    """Record what an update's passes are told, what routers add to it by themselves, and how adapters are scaled.

    `name` is that of the update in its records.
    """
    rate, lora = config.megatron.moe_bias_update_rate, config.lora
    with contextlib.ExitStack() as stack:
        stack.enter_context(given_arguments(probe, trainer, name, version))
        stack.enter_context(router_balance(probe, trainer, name, version, rate=rate))
        if has_router_losses(config):
            stack.enter_context(router_losses(probe, trainer, name, version))
        if compares_products(trainer):
            grpo = config.grpo if config.algorithm == "grpo" else None
            temperature, spread = (grpo.temperature, bool(grpo.entropy_weight)) if grpo else (1.0, False)
            looked = logit_spreads(probe, trainer, name, version, temperature=temperature, spread=spread)
            stack.enter_context(looked)
        if lora.rank:
            asked = lora.effective_alpha / lora.rank
            stack.enter_context(adapter_scales(probe, trainer, name, version, asked=asked))
        yield
