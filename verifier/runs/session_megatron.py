"""The trainer's side of a run, on every rank: load, score, plan, then update and sync, cycle by cycle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from verifier.core.records_weights import (
    JoinedTensor,
    LoadedShard,
    ShardAfterExport,
    ShardAfterIdleStep,
    ShardAfterScoring,
    Update,
    UpdatedShard,
)
from verifier.core.store import Recorder
from verifier.data.rollout import Rollout
from verifier.export import gather_megatron
from verifier.export.names import layout_of
from verifier.export.save import save_checkpoint
from verifier.launch.flight_recorder import label
from verifier.model import provider_megatron
from verifier.model.checkpoint import open_checkpoint
from verifier.plan.chunk_plan import ChunkPlan
from verifier.platform.cuda import another_cudnn
from verifier.probes.routes_megatron import record_replay, replaying_every_second
from verifier.probes.tokens_megatron import TokenProbe
from verifier.probes.trainer import record_rollouts, record_scored, record_step
from verifier.probes.weights_megatron import (
    LiveWeights,
    join,
    plan_of,
    record_config,
    record_plan,
    record_saved,
    record_source,
    record_tensors,
    recorded,
)
from verifier.runs.perturb import move
from verifier.runs.scenario import AT_LENGTH, AT_TEMPERATURE, TEMPERATURE, expected_rollouts, policy_loss, rollouts_of
from verifier.runs.spec import RunSpec
from verifier.runs.steps_megatron import Steps, record_rules
from verifier.runs.sync import EngineSide
from verifier.train import router_replay_megatron, step_megatron
from verifier.train.gradients_megatron import whole_gradients
from verifier.train.recompute_megatron import recomputed

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext
    from verifier.transport.cuda_ipc import TrainerRounds

DATA_PARALLEL = provider_megatron.DataParallel(
    distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True
)
"""Data-parallel settings that teams train with, and under which an export of stale weights is a real danger."""
RESUMED = 2
"""The step before which the optimizer is written, made anew and read again."""


class Session:
    """One run of the trainer on this rank, from load to the last sync.

    Args:
        spec: what to do.
        context: who this rank is.
        engine: on rank 0 of a run with an engine: its side of the conversation.
        share: where every trainer rank shows a buffer to the engine.
    """

    def __init__(
        self,
        spec: RunSpec,
        context: RankContext,
        probe: Recorder,
        engine: EngineSide | None = None,
        share: TrainerRounds | None = None,
    ) -> None:
        self.spec, self.context, self.probe, self.engine, self._share = spec, context, probe, engine, share
        self.rank, self.mesh = context.rank, spec.mesh
        self.work = Path(spec.work)
        self.source = open_checkpoint(spec.checkpoint)
        self.layout = layout_of(self.source.config)

    def say(self, text: str) -> None:
        """One line of progress, from rank 0."""
        if self.rank == 0:
            self.context.progress(text)

    def load(self, *, training: bool = True) -> None:
        """Build and load the trainer; record what every rank holds and what it must hold.

        Args:
            training: with room for gradients, which take several times the model's own memory.
        """
        spec = self.spec
        self.say(f"loading {self.mesh.world_size} trainer ranks ({self.mesh.label()})")
        self.trainer = provider_megatron.build(
            spec.checkpoint, self.mesh, dtype=spec.dtype, tier=spec.tier,
            data_parallel=DATA_PARALLEL if training else None, deadline_s=spec.deadline_s,
            overrides=router_replay_megatron.PROVIDER_FIELDS, fixes=spec.fixes,
        )  # fmt: skip
        if spec.tier == "cuda" and (found := another_cudnn()):
            self.say(found)
        self.live = LiveWeights(self.trainer.chunks, self.layout, self.mesh, self.rank)
        self.live.record_expected(self.probe, self.source)
        self.live.record(self.probe, 0, LoadedShard)
        if self.rank == 0 and not spec.source_from_manifest:
            record_source(self.probe, self.source)
        if self.rank == 0 and training and spec.update == "step":
            record_rules(self.probe)

    def score(self, version: int) -> None:
        """Teacher-forced log-probabilities by the trainer."""
        self.say(f"version {version}: trainer scores {len(self.spec.scenario.sequences)} sequences")
        sequences = self.spec.scenario.sequences
        rollouts, expected = rollouts_of(sequences, version), expected_rollouts(sequences, version)
        self._record_scored(
            "scored", version,
            step_megatron.score(self.trainer, rollouts, on_shards=self._token_probe("scored", version, expected)),
        )  # fmt: skip
        if version == 0:
            scored = step_megatron.score(self.trainer, rollouts, temperature=TEMPERATURE)
            self._record_scored(AT_TEMPERATURE, version, scored)
            if self.rank == 0:
                record_rollouts(self.probe, AT_TEMPERATURE, version, expected)
        if version == 0 and self.spec.scenario.long:
            sequences = self.spec.scenario.at_length
            self._record_scored(AT_LENGTH, version, step_megatron.score(self.trainer, rollouts_of(sequences, 0)))
            if self.rank == 0:
                record_rollouts(self.probe, AT_LENGTH, version, expected_rollouts(sequences, 0))
        with step_megatron.params_synced(self.trainer):
            self.live.record(self.probe, version, ShardAfterScoring)

    def _record_scored(self, name: str, version: int, scored: list[torch.Tensor]) -> None:
        record_scored(self.probe, name, version, scored, whole=self.rank == 0)

    def replay(self) -> None:
        """Of a mixture of experts: routes that rollouts carry are what the routers use."""
        if self.trainer.provider.num_moe_experts:
            self.say("replaying routes")
            record_replay(self.probe, self.trainer, rollouts_of(self.spec.scenario.sequences, 0))

    def _token_probe(self, name: str, version: int, expected: list[Rollout]) -> TokenProbe:
        return TokenProbe(self.probe, self.mesh, self.rank, name, version, expected)

    def export(self, version: int) -> Iterator[tuple[str, torch.Tensor]]:
        """The export stream, recorded; the tensor under way is named if a collective of it waits too long."""
        with label("export"):
            yield from recorded(self.probe, gather_megatron.export(self.trainer), version)

    def record_exported(self, version: int) -> None:
        """Record what an export leaves behind: the weights that it read, and the config.json that goes with it.

        Ranks gather here, so all have to be done with the export: while rank 0 sends, the others wait for it.
        """
        with step_megatron.params_synced(self.trainer):
            self.live.record(self.probe, version, ShardAfterExport)
        folder, whole = self.work / f"files-{version}", self.spec.saves and version == self.spec.cycles
        gather_megatron.save(self.trainer, folder, whole=whole)
        if self.rank == 0:
            record_config(self.probe, self.source, folder, version)
            if whole:
                record_saved(self.probe, folder, version)

    def agree_on_plan(self) -> bool:
        """Derive the chunk plan from the export of version 0, and compare its digest over all ranks."""
        # A run that sends version 0 records its export then, and not twice.
        stream = gather_megatron.export(self.trainer) if self.spec.restore_first else self.export(0)
        self.plan: ChunkPlan = plan_of(stream, self.spec.chunk_bytes)
        if not self.spec.restore_first:
            self.record_exported(0)
        record_plan(self.probe, self.plan, 0, entries=self.rank == 0)
        said: list[str] = [""] * self.mesh.world_size
        dist.all_gather_object(said, self.plan.digest)
        return len(set(said)) == 1

    def _record_disagreement(self) -> None:
        """Without a plan that all ranks hold nothing is sent; the export that they derived it from is recorded."""
        self.say("the ranks hold different chunk plans: nothing is sent")
        if self.spec.restore_first:
            for _ in self.export(0):
                pass
            self.record_exported(0)

    def idle_step(self) -> None:
        """An optimizer step of learning rate 0, which must move nothing; of fewer micro-batches than those after it."""
        batch = self.spec.scenario.batches[0]
        Steps(self.trainer).idle(rollouts_of(batch[: len(batch) // 2], 0))
        with step_megatron.params_synced(self.trainer):
            self.live.record(self.probe, 0, ShardAfterIdleStep)
        self._steps = Steps(self.trainer)

    def update(self, version: int) -> None:
        """Move the weights: a real optimizer step, or noise on every tensor."""
        self.say(f"version {version}: update by {self.spec.update}")
        if self.spec.update == "noise":
            move(self.live, self.source, f"{self.spec.seed}/{version}")
            return
        if version == RESUMED:
            self._steps.resume(self._folder("stopped"))
        batch = self.spec.scenario.batches[version - 1], version - 1
        look = self._token_probe("trained", version, expected_rollouts(*batch))
        replaying = replaying_every_second(self.probe, self.trainer, rollouts_of(*batch), version, look)
        with recomputed(self.trainer, on=version % 2 == 0), replaying as (rollouts, follow):
            result = self._steps.take(
                rollouts, loss=policy_loss, temperature=TEMPERATURE, on_shards=follow,
                on_gradients=lambda: self._dump_gradients(version),
            )  # fmt: skip
        record_step(self.probe, version, result)

    def _dump_gradients(self, version: int) -> None:
        """Hand the reduced gradients, joined by the layout, to the oracle; before the optimizer clips them."""
        if self.layout is None or not self.spec.gradients:
            return
        found = whole_gradients(self.trainer)
        shards = self._folder(f"gradient-shards-{version}")
        self.live.dump(
            shards, ((chunk, name, value) for chunk, values in enumerate(found) for name, value in values.items())
        )
        dist.barrier()
        if self.rank == 0:
            whole = join(shards, self.layout, self.mesh)
            save_checkpoint(self.work / f"gradients-{version}", self.source.config, whole.items())

    def _folder(self, name: str) -> Path:
        """A folder in the work place that rank 0 makes and all ranks then write into."""
        path = self.work / name
        if self.rank == 0:
            path.mkdir()
        dist.barrier()
        return path

    def rest(self) -> None:
        """The engine sleeps until the next sync. It counts the memory that it frees, so no rank takes any meanwhile."""
        if self.spec.sleep_level:
            if self.engine is not None:
                self.engine.sleep()
            dist.barrier()

    def sync(self, version: int) -> None:
        """Export and, if an engine takes part, transfer; on rank 0, keep what was sent."""
        self.say(f"version {version}: export and transfer")
        stream = self.export(version)
        self._sent: dict[str, torch.Tensor] = {}
        if self.engine is None and self._share is not None:
            from verifier.transport.cuda_ipc import follow

            follow(self._share, self.plan, stream)
        elif self.engine is None:
            for _ in stream:
                pass
        else:
            with self.engine.awake():
                self._sent = self.engine.transfer(self.plan, stream, version)
        self.record_exported(version)

    def record_update(self, version: int) -> None:
        """Live parameters of all ranks after an update, joined without Megatron-Bridge.

        A family without a layout row has no such join: the oracle then gets what was exported.
        """
        with step_megatron.params_synced(self.trainer):
            self.live.record(self.probe, version, UpdatedShard)
            if self.layout is None:
                if self._sent:
                    save_checkpoint(self.work / f"live-{version}", self.source.config, self._sent.items())
                return
            shards = self._folder(f"shards-{version}")
            self.live.dump(shards, self.live.tensors())
            dist.barrier()
        if self.rank == 0:
            whole = join(shards, self.layout, self.mesh)
            record_tensors(self.probe, JoinedTensor, whole.items(), version)
            self.probe.emit(Update(name=f"version {version}", version=version, how=self.spec.update))
            save_checkpoint(self.work / f"live-{version}", self.source.config, whole.items())

    def observe_engine(self, version: int) -> None:
        """Record what the engine holds, scores and samples at a version, unless it refused it."""
        if self.engine is None or self.engine.refused:
            return
        self.say(f"version {version}: engine scores and samples")
        self.engine.record_logprobs(self.spec.scenario.sequences, version)
        if self.spec.scenario.prompts:
            self.engine.record_samples(self.spec.scenario.prompts, version, self.spec.seed + version)
            self.engine.record_draws(self.spec.scenario.prompts[0], version, self.spec.seed + version)
        if self._sent:
            self.engine.record_held(self._sent, version)

    def roundtrip(self) -> None:
        """Everything, in the order of the data flow."""
        self.load()
        self.score(0)
        self.replay()
        self._sent = {name: self.source.read(name) for name in self.source.names()} if self.engine else {}
        agreed = self.agree_on_plan()
        if not agreed:
            self._record_disagreement()
            return
        if self.spec.restore_first:
            self.rest()
            self.sync(0)
        self.observe_engine(0)
        if self.spec.update == "step":
            self.idle_step()
        for version in range(1, self.spec.cycles + 1):
            self.rest()
            self.update(version)
            for act in self._acts(version):
                act(version)
            self.observe_engine(version)
        if self._sent:
            save_checkpoint(self.work / "exported", self.source.config, self._sent.items())

    def _acts(self, version: int) -> list[Callable[[int], None]]:
        """An update is recorded before the export, which must not change it; but to record it gathers what ranks share.

        Then who needs it has to ask for it first: the export, and every second time the forward pass.
        """
        if self.layout is not None and not self.mesh.has_copies:
            return [self.record_update, self.score, self.sync]
        if version % 2 == 0:
            return [self.score, self.sync, self.record_update]
        return [self.sync, self.record_update, self.score]

    def golden(self) -> None:
        """Load and export, nothing else."""
        self.load(training=False)
        self.say("exporting")
        for _ in self.export(0):
            pass
        self.record_exported(0)

    def tokens(self) -> None:
        """The token path alone: nothing is exported, no engine takes part."""
        self.load()
        self.score(0)
        self.replay()
        self.idle_step()
        for version in range(1, self.spec.cycles + 1):
            self.update(version)
            self.score(version)
            self.record_update(version)
