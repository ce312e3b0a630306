"""Observer of one rank of a judged training run: what it loads, scores, steps, sends, saves and exports."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from verifier.core.record import Probe
from verifier.core.store import Recorder
from verifier.data.rollout import Rollout
from verifier.engine.client import EngineClient, EngineGone
from verifier.export import gather_megatron
from verifier.probes.training.kept_records import Kept
from verifier.probes.training.step_trace import cuts_exports
from verifier.probes.training.update_evidence_megatron import UpdateEvidence
from verifier.stages.checkpoint.probe_loaded_state_megatron import record_facts, record_loaded
from verifier.stages.checkpoint.records import LoadedState, SavedState
from verifier.stages.engine.probe_engine_state import HeldEngine, record_held
from verifier.stages.export.probe_live_weights_megatron import record_files, record_live_weights
from verifier.stages.export.probe_tensors import source_tensors
from verifier.stages.load.probe_configs_megatron import record_live
from verifier.stages.load.probe_loaded_megatron import record_loaded_weights
from verifier.stages.load.records import SourceTensor
from verifier.stages.logprob.probe_scoring_passes_megatron import Digests, ScoringPasses, live_digests
from verifier.stages.replay.records import UsedRoutes
from verifier.stages.train.probe_adam_audit_megatron import Audits
from verifier.stages.train.probe_hand_on_megatron import AdapterEvidence, HandOn
from verifier.stages.train.records import UpdatedShard
from verifier.stages.transport.probe_megatron import AdapterTransfer, WeightTransfer, held_adapter
from verifier.train.router_replay_megatron import RouterWatch, Routing
from verifier.train.step_megatron import OnRows, params_synced
from verifier.train.written_megatron import Stepped
from verifier.trainer.observer import Note, RankObserver, RankParts, Transfer, TransferObserver, Update, UpdateObserver
from verifier.trainer.state_elements_megatron import elements_of
from verifier.trainer.state_megatron import Facts, digests_of


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
        if transfer.plan is None:
            return AdapterTransfer(self, transfer, probe, self._held, done)
        if parts.rank == 0 and not self.expected:
            self.expected = list(source_tensors(parts.source))
        cuts = parts.adapters is None and cuts_exports(parts.config, parts.tier, parts.source.num_bytes)
        return WeightTransfer(self, transfer, probe, self._held, done, parts.live if cuts else None)

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
                record_held(Path(trace), client.checkpoint_view(), sent, version)
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
        """Writer of this rank's part of what the oracle reads."""
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
