"""A run that trains all weights: exported whole, sent chunk by chunk by a plan that all ranks agree on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist

from verifier.core.records_engine import Handover
from verifier.core.records_weights import JoinedTensor, ShardAfterExport, Update, UpdatedShard
from verifier.export import gather_megatron
from verifier.export.adapters import AdapterLayout
from verifier.export.names import ModelLayout
from verifier.export.save import save_checkpoint
from verifier.launch.flight_recorder import label
from verifier.model import provider_megatron
from verifier.model.provider_megatron import TrainerModel
from verifier.probes.engine_state import record_poison
from verifier.probes.weight_transfer import TransferProbe
from verifier.probes.weights_megatron import (
    LiveWeights,
    join,
    plan_of,
    record_config,
    record_plan,
    record_saved,
    record_tensors,
    recorded,
)
from verifier.runs.rank_run_megatron import RankRun
from verifier.train import router_replay_megatron, step_megatron
from verifier.train.optimizer_megatron import named_gradients

DATA_PARALLEL = provider_megatron.DataParallel(
    distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
)
"""Data-parallel settings that teams train with, and under which an export of stale weights is a real danger."""


class FullWeights:
    """All weights; `AdapterWeights` has the same methods.

    Attributes:
        idles: a step of learning rate 0 is taken first.
        recording_gathers: recording an update gathers what ranks share, so that a stale export would not show after it.
    """

    idles = True

    def __init__(self, run: RankRun) -> None:
        self._run = run
        self.recording_gathers = run.layout is None or run.mesh.has_copies
        self._sent: dict[str, torch.Tensor] = {}

    def build(self, *, training: bool) -> None:
        """Build the model with Megatron-Bridge, and load the source.

        Args:
            training: with room for gradients, which take several times the model's own memory.
        """
        spec = self._run.spec
        self.trainer = provider_megatron.build(
            spec.checkpoint, spec.config.mesh, dtype=spec.config.dtype, tier=spec.tier,
            data_parallel=DATA_PARALLEL if training else None, deadline_s=spec.deadline_s,
            overrides=router_replay_megatron.PROVIDER_FIELDS, fixes=spec.fixes,
        )  # fmt: skip
        self.live = LiveWeights(self.trainer.chunks, self._run.layout, spec.config.mesh, self._run.rank)

    def export(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The export stream, recorded; the tensor under way is named if a collective of it waits too long."""
        with label("export"):
            yield from recorded(self._run.probe, gather_megatron.export(self.trainer), version)

    def export_only(self, version: int) -> None:
        """Export, and send nothing."""
        run = self._run
        for _ in self.export(version):
            pass
        record_exported(run, self.trainer, self.live, version)

    def begin(self) -> bool:
        """Derive the chunk plan from an export of version 0, and compare its digest over all ranks.

        Without a plan that all ranks hold nothing is sent; the export that they derived it from is recorded.
        """
        run, restores = self._run, self._run.spec.restore_first
        if run.link.client is not None:
            self._sent = {name: run.source.read(name) for name in run.source.names()}
        # A run that sends version 0 records its export then, and not twice.
        stream = gather_megatron.export(self.trainer) if restores else self.export(0)
        self._plan = plan_of(stream, run.spec.chunk_bytes)
        if not restores:
            record_exported(run, self.trainer, self.live, 0)
        record_plan(run.probe, self._plan, 0, entries=run.rank == 0)
        digests: list[str] = [""] * run.mesh.world_size
        dist.all_gather_object(digests, self._plan.digest)
        agreed = len(set(digests)) == 1
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
        run, link, stream = self._run, self._run.link, self.export(version)
        run.say(f"version {version}: export and transfer")
        watch = TransferProbe(link.ranks, version)
        with link.awake():
            if link.client is not None:
                for rank, outcomes in enumerate(link.client.poison()):
                    record_poison(link.ranks[rank], rank, outcomes, version)
            refused = link.transfer(self._plan, stream, watch)
        if link.client is not None:
            name = f"transfer of version {version}"
            run.probe.emit(Handover(name=name, version=version, refused=refused))
            self._sent = {} if refused else watch.sent
        record_exported(run, self.trainer, self.live, version)

    def hand_on_gradients(self, version: int) -> None:
        """Join the shards of all ranks' gradients by the layout; a collective."""
        run = self._run
        if run.layout is None:
            return
        named = named_gradients(self.trainer)
        whole = joined(run, f"gradient-shards-{version}", run.layout, self.live, named)
        if run.rank == 0:
            save_checkpoint(run.work / f"gradients-{version}", run.source.config, whole.items())

    def record_update(self, version: int) -> None:
        """Record every rank's shards, and the checkpoint that they are joined to.

        A family without a layout row has no such join: the oracle then gets what was exported.
        """
        run = self._run
        with step_megatron.params_synced(self.trainer):
            self.live.record(run.probe, version, UpdatedShard)
            whole = self._sent
            if run.layout is not None:
                whole = joined(run, f"shards-{version}", run.layout, self.live, self.live.tensors())
        if run.rank == 0 and whole:
            save_checkpoint(run.work / f"live-{version}", run.source.config, whole.items())
            if run.layout is not None:
                record_tensors(run.probe, JoinedTensor, whole.items(), version)
                run.probe.emit(
                    Update(
                        name=f"version {version}",
                        version=version,
                        how="noise" if run.spec.roundtrip.update == "noise" else "step",
                    )
                )

    def expected_in_engine(self, version: int) -> dict[str, torch.Tensor]:
        """Tensors as they were sent, or the source's before any were."""
        return self._sent

    def finish(self) -> None:
        """Write what was sent last as a checkpoint."""
        if self._sent:
            save_checkpoint(self._run.work / "exported", self._run.source.config, self._sent.items())


def joined(
    run: RankRun,
    folder: str,
    layout: ModelLayout | AdapterLayout,
    live: LiveWeights,
    tensors: Iterable[tuple[int, str, torch.Tensor]],
) -> dict[str, torch.Tensor]:
    """On rank 0, tensors of all ranks by their published names, each once; a collective.

    Args:
        run: of this rank.
        folder: new, for the shards.
        layout: by which they are joined.
        live: knows which of them this rank owns.
        tensors: this rank's, as `live.tensors()` gives them, or gradients in their place.
    """
    shards = run.folder(folder)
    live.dump(shards, tensors)
    dist.barrier()
    return join(shards, layout, run.mesh) if run.rank == 0 else {}


def record_exported(run: RankRun, trainer: TrainerModel, live: LiveWeights, version: int) -> None:
    """Record what an export leaves behind: the weights that it read, and the config.json that goes with it.

    Ranks gather here, so all have to be done with the export: while rank 0 sends, the others wait for it.
    """
    with step_megatron.params_synced(trainer):
        live.record(run.probe, version, ShardAfterExport)
    folder, whole = run.work / f"files-{version}", run.spec.saves and version == run.spec.cycles
    gather_megatron.save(trainer, folder, whole=whole)
    if run.rank == 0:
        record_config(run.probe, run.source, folder, version)
        if whole:
            record_saved(run.probe, folder, version)
