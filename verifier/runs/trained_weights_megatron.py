"""Weights that a run trains and syncs: all of them, sent chunk by chunk, or an adapter, handed over as a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist

from verifier.core.stage import Stage, in_stage
from verifier.export import gather_megatron
from verifier.export.live_weights import LiveWeights
from verifier.export.save import save_checkpoint
from verifier.launch.child import give_memory_back
from verifier.launch.flight_recorder import label
from verifier.megatron import lora_megatron, router_replay_megatron
from verifier.megatron.lora_megatron import SCALING, LoraSpec
from verifier.megatron.step_megatron import params_synced
from verifier.model import provider_megatron
from verifier.model.adapted import Adapted
from verifier.model.provider_megatron import TrainerModel
from verifier.plan.chunk_plan import plan_of
from verifier.platform.gather_json import agree
from verifier.runs.rank_run_megatron import RankRun
from verifier.stages.engine.probe_engine_state import TransferProbe
from verifier.stages.export.probe_tensors import IndexedFiles, record_saved, record_tensors, recorded
from verifier.stages.export.records import ShardAfterExport
from verifier.stages.load.probe_configs_megatron import record_config, record_exported_adapter, record_live, record_plan
from verifier.stages.load.records import AdapterShard
from verifier.stages.train.probe_hand_on_megatron import HandOn, record_matrices, record_spreads
from verifier.stages.train.records import FrozenShard, JoinedTensor, LiveAdapterMatrix, Update, UpdatedShard
from verifier.stages.transport.records import Handover
from verifier.trainer.weight_sync_megatron import Adapters, joined

DATA_PARALLEL = provider_megatron.DataParallel(
    distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
)
"""Data-parallel settings that teams train with, and under which an export of stale weights is a real danger."""


class TrainedWeights:
    """Acts that all weights and an adapter have in common.

    Attributes:
        trainer: the model, once `build` has made it.
        live: its weights, without adapters.
        trained: those of them that steps change.
        sent: on rank 0, what the engine has to hold, by name; empty after a transfer that it refused.
    """

    trainer: TrainerModel
    live: LiveWeights
    trained: LiveWeights
    _adapters: Adapters | None = None

    def __init__(self, run: RankRun) -> None:
        self._run = run
        self.sent: dict[str, torch.Tensor] = {}

    def _source(self) -> dict[str, torch.Tensor]:
        return {name: self._run.source.read(name) for name in self._run.source.names()}

    def _build(self, *, training: bool = True, **options: Any) -> None:
        spec = self._run.spec
        self.trainer = provider_megatron.build(
            spec.checkpoint, spec.config.mesh, dtype=spec.config.dtype, tier=spec.tier,
            data_parallel=DATA_PARALLEL if training else None, deadline_s=spec.deadline_s, fixes=spec.fixes, **options,
        )  # fmt: skip

    def hand_on_gradients(self, version: int) -> None:
        """Join the shards of all ranks' reduced gradients by the layout, for the oracle. A collective."""
        if self._run.layout is not None:
            give_memory_back()
            self._hand_on().gradients(version)

    def _hand_on(self) -> HandOn:
        """Writer of what the oracle reads, of a model with a layout."""
        run = self._run
        return HandOn(self.trainer, None, self.trained, run.rank, run.work, run.source, self._adapters)

    def _save(self, folder: str, tensors: Mapping[str, torch.Tensor]) -> None:
        if tensors:
            save_checkpoint(self._run.work / folder, self._run.source.config, tensors.items())

    def _record_exported(self, version: int) -> None:
        """Record what an export leaves behind: the weights that it read, and the config.json that goes with it.

        Ranks gather here, so all have to be done with the export: while rank 0 sends, the others wait for it.
        """
        run = self._run
        folder, whole = run.work / f"files-{version}", run.spec.saves and version == run.spec.cycles
        with in_stage(Stage.EXPORT, version):
            with params_synced(self.trainer):
                record_live(run.probe, self.live, version, ShardAfterExport)
            gather_megatron.save(self.trainer, folder, whole=whole)
        if run.rank == 0:
            record_config(run.probe, run.source, folder, version)
            if whole:
                record_saved(run.probe, IndexedFiles(folder), version)


class FullWeights(TrainedWeights):
    """All weights: exported whole, sent chunk by chunk by a plan that all ranks agree on.

    Attributes:
        idles: a step of learning rate 0 is taken first.
        recording_gathers: recording an update gathers what ranks share, so that a stale export would not show after it.
    """

    idles = True

    def __init__(self, run: RankRun) -> None:
        super().__init__(run)
        self.recording_gathers = run.layout is None or run.mesh.has_copies

    def build(self, *, training: bool) -> None:
        """Build the model with Megatron-Bridge, and load the source.

        For `training` there is room for gradients, which take several times the model's own memory.
        """
        self._build(training=training, overrides=router_replay_megatron.PROVIDER_FIELDS)
        self.live = self.trained = LiveWeights(self.trainer.chunks, self._run.layout, self._run.mesh, self._run.rank)

    def export(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The export stream, recorded; the tensor under way is named if a collective of it waits too long."""
        with label("export"), in_stage(Stage.EXPORT, version):
            yield from recorded(self._run.probe, gather_megatron.export(self.trainer), version)

    def export_only(self, version: int) -> None:
        """Export, and send nothing."""
        for _ in self.export(version):
            pass
        self._record_exported(version)

    def begin(self) -> bool:
        """Derive the chunk plan from an export of version 0, and compare its digest over all ranks.

        Without a plan that all ranks hold nothing is sent; the export that they derived it from is recorded.
        """
        run, restores = self._run, self._run.spec.restore_first
        if run.link.client is not None:
            self.sent = self._source()
        # A run that sends version 0 records its export then, and not twice.
        stream = gather_megatron.export(self.trainer) if restores else self.export(0)
        self._plan = plan_of(stream, run.spec.chunk_bytes)
        if not restores:
            self._record_exported(0)
        record_plan(run.probe, self._plan, entries=run.rank == 0)
        agreed = agree(self._plan.digest)
        if not agreed:
            run.say("the ranks hold different chunk plans: nothing is sent")
            if restores:
                self.export_only(0)
        elif restores:
            run.link.rest()
            self.sync(0)
        return agreed

    def sync(self, version: int) -> None:
        """Poison everything that the engine holds, then export and transfer."""
        run, link = self._run, self._run.link
        run.say(f"version {version}: export and transfer")
        watch, self.sent = TransferProbe(run.engines, version), {}
        link.transfer(self._plan, self.export(version), watch)
        if link.client is not None:
            run.probe.emit(Handover(name=f"transfer of version {version}", version=version, refused=link.refused))
            self.sent = {} if link.refused else watch.sent
        self._record_exported(version)  # the other ranks wait there for the transfer, and not for the files too
        if version == run.spec.cycles:
            self._save("exported", self.sent)

    def record_update(self, version: int) -> None:
        """Record every rank's shards, and the checkpoint that they join to; else the oracle gets what was sent."""
        run, how = self._run, self._run.spec.roundtrip.update
        with params_synced(self.trainer):
            record_live(run.probe, self.live, version, UpdatedShard)
        if run.layout is None:
            self._save(f"weights-{version}", self.sent)
        elif self._hand_on().after(version, run.probe, version):
            run.probe.emit(Update(name=f"version {version}", version=version, how=cast(Any, how)))


class AdapterWeights(TrainedWeights):
    """An adapter, see `FullWeights`; the base stays as it is on both sides, and none of it is sent."""

    idles = recording_gathers = False
    _adapters: Adapters

    def build(self, *, training: bool) -> None:
        """Build the model, load the source, put adapters on it, and record them before any step."""
        run, rank = self._run, self._run.spec.lora_rank
        lora = LoraSpec(rank, round(SCALING * rank))
        self._build(adapt=partial(lora_megatron.attach, lora=lora))
        self._adapters = Adapters(self.trainer, run.source, lora, run.rank, run.work)
        self.live, self.trained = self._adapters.base, self._adapters.trained
        record_live(run.probe, self.trained, 0, AdapterShard)
        if run.layout is not None:
            matrices = self._hand_on().after(0)
            record_tensors(run.probe, LiveAdapterMatrix, matrices.items(), 0)
            record_spreads(run.probe, matrices)

    def begin(self) -> bool:
        """Export base and adapter as they are loaded."""
        self.sync(0)
        return True

    def sync(self, version: int) -> None:
        """Export base and adapter; the engine loads the adapter from a file."""
        run = self._run
        run.say(f"version {version}: export base and adapter")
        path = run.work / f"adapter-{version}"
        with label("export"), in_stage(Stage.EXPORT, version):
            for _ in recorded(run.probe, lora_megatron.export_base(self.trainer), version):
                pass
            adapter = self._adapters.save(path)
        self._record_exported(version)
        if version and run.rank == 0:
            record_exported_adapter(run.probe, path, version)
            if run.layout is None:
                written = save_checkpoint(run.work / f"weights-{version}", run.source.config, adapter.items())
                names = {name: [name] for name in adapter if name.endswith(".lora_A.weight")}
                Adapted(base=str(run.source.path), scaling=SCALING, names=names).save(written)
            if run.link.client is not None:
                run.link.client.load_adapter(path)
        dist.barrier()
        if run.link.client is not None:
            held = lora_megatron.held_by_engine(adapter, SCALING)
            if not version:  # the place of the first adapter is empty
                held = {name: torch.zeros_like(tensor) for name, tensor in held.items()}
            self.sent = self._source() | held

    def record_update(self, version: int) -> None:
        """Record base and adapter of all ranks after an update."""
        run = self._run
        with params_synced(self.trainer):
            record_live(run.probe, self.live, version, UpdatedShard, FrozenShard)
            if run.layout is None:
                return
            base = joined(self.live, self.live.tensors(), run.work / f"shards-{version}", run.rank)
            record_tensors(run.probe, JoinedTensor, base, version)
        matrices = self._hand_on().after(version)
        record_matrices(run.probe, self.trainer, matrices, version, run.rank)
        if run.rank == 0:
            run.probe.emit(Update(name=f"adapter {version}", version=version, how="adapter step"))
