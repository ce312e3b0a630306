"""The trainer's side of a run, on every rank: load, score, replay, then update, export and sync, cycle by cycle."""

from __future__ import annotations

import contextlib
import math
import resource
from collections.abc import Callable
from typing import TYPE_CHECKING

from msgspec import convert, to_builtins

from verifier.config_json import text_model
from verifier.core.record import real
from verifier.core.stage import Stage, in_stage
from verifier.data.recorded import RolloutRow
from verifier.launch.child import entered, give_memory_back
from verifier.megatron import step_megatron
from verifier.model import provider_megatron
from verifier.model.checkpoint import end_tokens
from verifier.model.families import served
from verifier.platform.cuda import another_cudnn
from verifier.platform.gather_json import gather_json
from verifier.runs.engine_requests import EngineRequests
from verifier.runs.rank_run_megatron import RankRun, rank_run
from verifier.runs.spec import RunSpec
from verifier.runs.steps_megatron import Steps, move
from verifier.runs.trained_weights_megatron import AdapterWeights, FullWeights
from verifier.runs.workload import Answer, Workload, expected_rollouts, policy_loss, rollouts_of, with_answers
from verifier.stages.engine.probe_engine_state import held_by, record_views
from verifier.stages.export.probe_tensors import record_source
from verifier.stages.load.probe_configs_megatron import record_expected, record_live, record_provider, record_stated
from verifier.stages.load.records import LoadedShard
from verifier.stages.logprob.probe_activations_megatron import ActivationProbe
from verifier.stages.logprob.probe_scoring_passes_megatron import given_arguments
from verifier.stages.pack.probe_tokens import TokenProbe, record_of_rollouts, record_scored
from verifier.stages.replay.probe_megatron import record_replay, replaying
from verifier.stages.train.records import ShardAfterIdleStep, ShardAfterScoring, StepReport
from verifier.trainer.preload_megatron import preload as preload

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext

REPLAYED, RECOMPUTED = (1, 3), (2, 3)
"""Versions, modulo 4, whose steps replay routes, and recompute activations; 0 is the idle step's."""
RESUMED = 2
"""Version before whose step a checkpoint is written, and read by an optimizer made anew, where TRN001 judges it."""


def run(context: RankContext) -> dict[str, float]:
    """Rank function of every run: its sessions, one after another."""
    for number, record in enumerate(context.args["sessions"]):
        spec = RunSpec.from_json(record)
        if number:
            provider_megatron.teardown()
        with contextlib.ExitStack() as stack:
            stack.enter_context(entered(spec.within, spec, context))
            with in_stage(Stage.TRANSPORT):
                session = Session(stack.enter_context(rank_run(spec, context)))
            getattr(session, spec.recipe)()
    return {"peak_gib": math.ceil(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20 * 100) / 100}


class Session:
    """One session of the trainer on this rank."""

    def __init__(self, run: RankRun) -> None:
        self._run = run
        self._weights = AdapterWeights(run) if run.spec.lora_rank else FullWeights(run)
        self._answers: list[Answer] = []

    @property
    def _workload(self) -> Workload:
        assert self._run.spec.workload is not None
        return self._run.spec.workload

    def golden(self) -> None:
        """Load and export, nothing else."""
        self._load(training=False)
        self._run.say("exporting")
        assert isinstance(self._weights, FullWeights)
        with in_stage(Stage.EXPORT):
            self._weights.export_only(0)

    def bisect(self) -> None:
        """Score one batch and compute its gradients, every module watched; nothing is stepped."""
        run, workload = self._run, self._workload
        self._build()
        batch, trainer, objective = workload.batches[0], self._trainer, workload.objective
        sequences = {row.id: at for at, row in enumerate(batch)}

        def probe(step: str) -> ActivationProbe:
            return ActivationProbe(run.probe, trainer, run.mesh, run.rank, sequences, step)

        run.say(f"scoring {len(batch)} sequences, every module watched")
        watch = probe("score")
        with in_stage(Stage.LOGPROB), watch.watching():
            found = step_megatron.score(
                trainer, rollouts_of(batch), temperature=objective.temperature, on_shards=watch
            )  # fmt: skip
        watch.scored(found)
        run.say("forward and backward, every module watched")
        watch = probe("train")
        with in_stage(Stage.LOSS), watch.watching():
            step_megatron.backward(
                trainer, rollouts_of(batch), loss=watch.loss(policy_loss(objective, 1)),
                temperature=objective.temperature, micro_batch_size=workload.micro_batch_size, on_shards=watch,
            )  # fmt: skip
        self._weights.hand_on_gradients(0)

    def roundtrip(self) -> None:
        """Everything, in the order of the data flow; without an engine what needs no export."""
        run = self._run
        self._load()
        with in_stage(Stage.LOGPROB):
            self._score(0)
        with in_stage(Stage.REPLAY):
            self._replay()
        with in_stage(Stage.EXPORT):
            if run.spec.exports and not self._weights.begin():
                return
        self._observe_engine(0)
        with in_stage(Stage.TRAIN):
            self._idle_step()
        run.source.unmap()
        for version in range(1, run.spec.cycles + 1):
            with in_stage(Stage.TRAIN, version):
                run.link.rest()
                self._update(version)
            for stage, act in self._acts(version):
                give_memory_back()
                with in_stage(stage, version):
                    act(version)
            give_memory_back()
            self._observe_engine(version)

    def _acts(self, version: int) -> list[tuple[Stage, Callable[[int], None]]]:
        """Order of recording an update, exporting and scoring.

        An update is recorded before the export, which must not change it. Where recording gathers what ranks share, the
        export, and every second time the forward pass, come first: each has to gather by itself.
        """
        weights = self._weights
        score, update = (Stage.LOGPROB, self._score), (Stage.TRAIN, weights.record_update)
        sync = (Stage.TRANSPORT, weights.sync)
        if not self._run.spec.exports:
            return [score, update]
        if not weights.recording_gathers:
            return [update, score, sync]
        if version % 2 == 0:
            return [score, sync, update]
        return [sync, update, score]

    def _build(self, *, training: bool = True) -> None:
        run = self._run
        adapters = " with adapters" if run.spec.lora_rank else ""
        run.say(f"loading {run.mesh.world_size} trainer ranks ({run.mesh.label()}){adapters}")
        with in_stage(Stage.LOAD):
            self._weights.build(training=training)
        self._trainer = self._weights.trainer

    def _load(self, *, training: bool = True) -> None:
        """Build and load the trainer; record what ranks hold, what they must hold, and what steps have to do."""
        self._build(training=training)
        run, spec, live = self._run, self._run.spec, self._weights.live
        if spec.tier == "cuda" and (found := another_cudnn()):
            run.say(found)
        record_expected(run.probe, live, run.source)
        record_live(run.probe, live, 0, LoadedShard)
        if run.rank == 0 and not spec.source_from_manifest:
            record_source(run.probe, run.source)
        if spec.workload is not None:
            record_provider(run.probe, self._trainer.provider, self._trainer.chunks)
            if run.rank == 0:
                record_stated(run.probe, run.source)
        if spec.workload is not None and spec.roundtrip.update == "step" and run.rank == 0:
            run.probe.emit(spec.workload.rule)
            run.probe.emit(spec.workload.objective)

    def _score(self, version: int) -> None:
        run, (first, *others) = self._run, self._workload.passes
        run.say(f"version {version}: trainer scores {len(first.rollouts)} sequences")
        for item in (first, *others) if version == 0 else (first,):
            look = self._token_probe(item.name, version, item.rollouts) if item is first else None
            if look is None and run.rank == 0:
                run.probe.emit(*record_of_rollouts(item.name, version, expected_rollouts(item.rollouts)))
            rollouts = rollouts_of(item.rollouts)
            followed = look and given_arguments(run.probe, self._trainer, item.name, version)
            with followed or contextlib.nullcontext():
                found = step_megatron.score(self._trainer, rollouts, temperature=item.temperature, on_shards=look)
            record_scored(run.probe, item.name, version, found, item.temperature, whole=run.rank == 0)
        with step_megatron.params_synced(self._trainer):
            record_live(run.probe, self._weights.live, version, ShardAfterScoring)

    def _token_probe(self, name: str, version: int, rows: tuple[RolloutRow, ...]) -> TokenProbe:
        run = self._run
        return TokenProbe(run.probe, run.mesh, run.rank, name, version, expected_rollouts(rows))

    def _replay(self) -> None:
        """Record that the routers of a mixture of experts use the routes that rollouts carry."""
        provider = self._trainer.provider
        if provider.num_moe_experts and provider.moe_enable_routing_replay:
            self._run.say("replaying routes")
            record_replay(self._run.probe, self._trainer, rollouts_of(self._workload.passes[0].rollouts))

    def _idle_step(self) -> None:
        """An optimizer step of learning rate 0, which must move nothing; of fewer micro-batches than those after it.

        The long rollout of its batch is left out.
        """
        if self._run.spec.roundtrip.update != "step":
            return
        if self._weights.idles:
            batch = self._workload.batches[0]
            self._step(self._new_steps(), batch[1 : 1 + len(batch) // 2], 0, learning_rate=0.0)
            with step_megatron.params_synced(self._trainer):
                record_live(self._run.probe, self._weights.live, 0, ShardAfterIdleStep)
        self._steps = self._new_steps()

    def _new_steps(self) -> Steps:
        return Steps(self._trainer, self._workload.rule, self._workload.micro_batch_size)

    def _update(self, version: int) -> None:
        """Move the weights: a real optimizer step, or noise on every tensor."""
        run = self._run
        run.say(f"version {version}: update by {run.spec.roundtrip.update}")
        if run.spec.roundtrip.update == "noise":
            move(self._weights.live, run.source, f"{run.spec.roundtrip.seed}/{version}")
            return
        if version == RESUMED and run.spec.gradients:
            self._steps.resume(run.folder("stopped"))
        self._step(self._steps, self._batch(version), version)

    def _batch(self, version: int) -> tuple[RolloutRow, ...]:
        """Rollouts that are trained on to make a version; in the last, some are the engine's own samples of before."""
        run, batch = self._run, self._workload.batches[version - 1]
        if version != run.spec.cycles or not run.spec.exports:
            return batch
        return with_answers(batch, convert(gather_json(to_builtins(self._answers))[0], list[Answer]), version - 1)

    def _step(self, steps: Steps, batch: tuple[RolloutRow, ...], version: int, **options: float) -> None:
        """One optimizer step, recorded; the first four have every combination of replay and recomputation."""
        run, workload = self._run, self._workload
        recompute, replay = version % 4 in RECOMPUTED, version % 4 in REPLAYED
        look = self._token_probe("trained", version, batch)
        routes = replaying(run.probe, self._trainer, rollouts_of(batch), version, look, on=replay)
        given = given_arguments(run.probe, self._trainer, "trained", version)
        with step_megatron.recomputed(self._trainer, on=recompute), routes as (rollouts, follow), given:
            result = steps.take(
                rollouts, loss=policy_loss(workload.objective, version), on_shards=follow,
                temperature=workload.objective.temperature, **options,
                on_gradients=(lambda: self._weights.hand_on_gradients(version)) if run.spec.gradients else None,
            )  # fmt: skip
        run.probe.emit(
            StepReport(
                name="step", version=version, loss=real(result.loss), num_tokens=result.num_tokens,
                grad_norm=real(result.grad_norm),
            )
        )  # fmt: skip

    def _observe_engine(self, version: int) -> None:
        """Record what the engine holds, scores and samples at a version, unless it refused it."""
        run, link, workload = self._run, self._run.link, self._workload
        if link.client is None or link.refused:
            return
        run.say(f"version {version}: engine scores and samples")
        vocabulary = int(text_model(run.source.config)["vocab_size"])
        requests = EngineRequests(
            link.client, run.engines[0], version, run.spec.roundtrip.seed, vocabulary,
            sorted(end_tokens(run.source)), more=version == run.spec.cycles,
        )  # fmt: skip
        with in_stage(Stage.ROLLOUT, version):
            requests.score(workload.passes[0].name, [row.tokens for row in workload.passes[0].rollouts])
            if workload.prompts:
                requests.sample(workload.prompts)
                self._answers = requests.answers
                requests.draw(workload.prompts[0])
        with in_stage(Stage.ENGINE, version):
            held_by(link.client).record(run.engines, version)
            for rank, slices in enumerate(link.client.checkpoint_view()):
                record_views(run.engines[rank], slices, served(self._weights.sent, run.source.config), version)
        self._weights.sent = {}  # nothing compares it from here on, and it is as large as the model
        give_memory_back()
