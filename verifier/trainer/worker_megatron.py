"""One trainer rank that serves the controller's calls: load, train, evaluate, export."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verifier.algorithms.registry import load_plugins
from verifier.core.outputs import full_disk_refused
from verifier.core.records_trainer import KnobsReached, OptimizerSettings
from verifier.core.records_weights import UpdatedShard
from verifier.core.stage import in_stage
from verifier.core.store import Recorder
from verifier.data.rollout_file import load_rollouts
from verifier.engine.sender import Running
from verifier.export.derived import DerivedLayout
from verifier.export.names import layout_of
from verifier.launch.child import resolve
from verifier.model import provider_megatron
from verifier.model.checkpoint import open_checkpoint
from verifier.platform.upstream_fixes import selected
from verifier.probes.configs_megatron import record_provider, record_stated
from verifier.probes.trainer import TokenProbe
from verifier.probes.weights_megatron import LiveWeights
from verifier.train import checkpoint_megatron, lora_megatron, optimizer_megatron, router_order_megatron, step_megatron
from verifier.train.offload_megatron import state_tensors
from verifier.train.policy_loss_megatron import LossMeter, policy_loss
from verifier.train.vocab_logprob import shortfall
from verifier.trainer import update_facts_megatron, update_log
from verifier.trainer.adam_audit_megatron import Audits, groups_of
from verifier.trainer.adapter_sync_megatron import AdapterSync
from verifier.trainer.adapters_megatron import Adapters, Kept, spec_of
from verifier.trainer.final_export_megatron import FinalExport
from verifier.trainer.given_routes import SCORED
from verifier.trainer.hand_on_megatron import HandOn
from verifier.trainer.live_settings_megatron import data_parallel_of, effective_settings, settings_of
from verifier.trainer.load_evidence_megatron import loaded_weights
from verifier.trainer.out_of_memory import refused_for_memory
from verifier.trainer.reference_megatron import live_digests
from verifier.trainer.routing_megatron import TrainingRoutes
from verifier.trainer.saves_megatron import Saves
from verifier.trainer.scoring_passes_megatron import ScoringPasses
from verifier.trainer.state_elements_megatron import elements_of
from verifier.trainer.state_megatron import Facts, digests_of, reference_facts, replaced, state_facts
from verifier.trainer.step_trace import can_audit, cuts_exports
from verifier.trainer.turns_megatron import Turns
from verifier.trainer.update_records_megatron import UpdateRecords, watched
from verifier.trainer.upstream_fields import found, provider_overrides
from verifier.trainer.weight_sync_megatron import WeightSync
from verifier.trainer.worker_spec import CALLS, WorkerSpec, loss_of

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext


def run(context: RankContext) -> None:
    """Rank function of a training run."""
    spec = WorkerSpec.from_json(context.args)
    router_order_megatron.install()
    with contextlib.ExitStack() as stack:
        if spec.within:
            function, *arguments = spec.within
            stack.enter_context(resolve(function)(spec, context, *arguments))
        worker = TrainerWorker(spec, context)
        context.serve({name: partial(worker.answer, name) for name in CALLS})


class TrainerWorker:
    """Model, optimizer and scheduler of one rank. Every public method is a collective, and an answer to a call."""

    def __init__(self, spec: WorkerSpec, context: RankContext) -> None:
        self._spec, self._context = spec, context
        self._config = config = spec.config
        load_plugins(config.plugins)
        self._probe: Recorder | None = None
        self._sync: WeightSync | AdapterSync | None = None
        self._sent_first: int | None = None
        self._turns: Turns | None = None
        self._adapters: Adapters | None = None
        self._left: Kept | None = None
        self._reference: list[torch.Tensor] = []
        self._passes = ScoringPasses(judged=config.verify.steps and config.algorithm == "grpo")
        self._saves = Saves(context.rank, str(config.mesh.coordinate(context.rank)))
        batch = config.batch
        self._batching: dict[str, Any] = {"micro_batch_size": batch.count, "max_tokens": batch.max_tokens}
        self._loss = loss_of(config)
        self._temperature = 1.0 if config.algorithm == "sft" else config.grpo.temperature

    def answer(self, name: str, **arguments: Any) -> Any:
        """Answer a call, in its turn on the GPUs."""
        turn = contextlib.nullcontext() if self._turns is None else self._turns.taken(name)
        stage = in_stage(CALLS[name], int(arguments.get("step", arguments.get("version", self._saves.trained))))
        with turn, refused_for_memory(self._config, self._spec.tier, self._context.rank, name), stage:
            return getattr(self, name)(**arguments)

    def load(self, resume: str | None = None, same_mesh: bool = True) -> dict[str, Any]:
        """Build the model, load its weights and make a new optimizer, or take those of a run's checkpoint, if named.

        Returns:
            Rank 0's effective settings.
        """
        spec, config = self._spec, self._config
        self._say(f"loading {config.mesh.world_size} trainer ranks ({config.mesh.label()})")
        checkpoint_megatron.seed_all(provider_megatron.stage_seed(config.seed, config.mesh, self._context.rank))
        lora = spec_of(config.lora)
        self._trainer = provider_megatron.build(
            spec.checkpoint, config.mesh, dtype=config.dtype, tier=spec.tier,
            data_parallel=data_parallel_of(config.megatron), overrides=provider_overrides(config),
            seed=config.seed, deadline_s=spec.collective_deadline_s, fixes=sorted(selected(config.fixes)),
            adapt=None if lora is None else partial(lora_megatron.attach, lora=lora),
        )  # fmt: skip
        self._settings = OptimizerSettings(name="Adam", **spec.optimizer)
        self._optimizer = optimizer_megatron.make_optimizer(self._trainer, rule=self._settings)
        self._scheduler = optimizer_megatron.make_step_scheduler(self._optimizer, self._settings)
        self._source = open_checkpoint(spec.checkpoint)
        derived = None if spec.layout is None else DerivedLayout.from_json(spec.layout)
        layout, rank = layout_of(self._source.config) or derived, self._context.rank
        self._whole = self._live = LiveWeights(self._trainer.chunks, layout, config.mesh, rank)
        if lora is not None:
            self._adapters = Adapters(self._trainer, self._source, lora, rank, config.run / "adapters")
            self._live = self._adapters.trained
        self._audits = Audits(self._trainer, self._optimizer, self._settings, self._live.places, rank)
        self._reference = [item.clone() for _, _, item in self._live.tensors() if config.grpo.has_reference]
        self._begun = live_digests(self._live) if self._reference and resume is None else {}
        self._parts = (self._trainer, self._optimizer, self._scheduler)
        lives = [self._live] if self._adapters is None else [self._adapters.base, self._live]
        self._elements = partial(elements_of, *self._parts, lives, self._reference)
        self._writer = checkpoint_megatron.Writer(
            *self._parts, asynchronous=config.checkpoint.asynchronous, read_back=config.verify.steps
        )
        self._routes = TrainingRoutes(self._trainer, config)
        if resume is not None:
            self._resume(Path(resume), same_mesh)
        self._loaded = loaded_weights(config, self._trainer, self._adapters or self._live, self._source, resume)
        self._frozen = digests_of(self._reference, self._live)
        return {"knobs": self._reached(), **effective_settings(*self._parts[:2])} if self._context.rank == 0 else {}

    def _resume(self, folder: Path, same_mesh: bool) -> None:
        self._say(f"loading the checkpoint {folder}")
        checkpoint_megatron.load(*self._parts, folder / "megatron", same_mesh=same_mesh)
        if self._config.verify.steps:
            self._saves.read(folder, self._state(), self._elements(), same_mesh=same_mesh)

    def record_load(self, trace: str) -> None:
        """Record what was saved and what was loaded, in a trace of its own."""
        with contextlib.closing(self._new_recorder(trace)) as probe:
            self._record_resume(probe)

    def _state(self) -> Facts:
        """Digests of all that this rank holds. A collective."""
        with step_megatron.params_synced(self._trainer):
            facts = state_facts(self._trainer, self._whole, self._optimizer, self._scheduler, self._context.rank)
        return [*facts, *reference_facts(self._reference, self._live)]

    def save(self, folder: str) -> None:
        """Begin to write a checkpoint: this rank's state, and what it held."""
        path, steps = Path(folder), optimizer_megatron.steps_of(self._optimizer)
        self._writer.begin(path / "megatron", self._audits.stepped(steps))
        with full_disk_refused(path):  # a look before the save would gather weights that the save itself does not
            self._saves.write(path, self._state(), self._elements())

    def saved(self, folder: str, wait: bool) -> list[dict[str, Any]] | None:
        """Return what was read back of the checkpoint, once it is written; None before."""
        return self._writer.done(Path(folder) / "megatron", wait=wait)

    def score(self, batch: str, which: str, to: str) -> None:
        """Score a batch by the weights as they are, or by the reference; rank 0 writes the log-probabilities.

        Args:
            batch: file of `save_rollouts`.
            which: "current" or "reference"; "greedy" and "shortfall" by the weights as they are, of undivided logits.
            to: safetensors file with ``logprobs`` float32 over all tokens, nats, NaN for the first of each rollout.
        """
        rollouts, _ = load_rollouts(Path(batch))
        temperature = 1.0 if which == "greedy" else self._temperature
        read = shortfall if which == "shortfall" else None
        with self._weights_of(which):
            on_rows = self._passes.begin(which, Path(batch).stem, rollouts, self._live)
            with self._routes.during(rollouts, Path(batch).stem, SCORED.get(which, which)) as look:
                found = step_megatron.score(
                    self._trainer, rollouts, temperature=temperature, on_shards=look, on_rows=on_rows, read=read,
                    **self._batching,
                )  # fmt: skip
        if self._context.rank == 0:
            update_facts_megatron.write_logprobs(found, to)

    def hold(self, version: int, folder: str) -> None:
        """Write the weights as they are, a version, for the oracle of a later step."""
        self._hand_on(folder).after(version)

    def train(
        self, step: int, number: int, batch: str, trace: str | None, first: bool, last: bool, oracle: str | None = None
    ) -> dict[str, float]:
        """Take one optimizer step on a batch of `save_rollouts`; its evidence goes to a trace, if one is named.

        Args:
            step: step of the run, from 1.
            number: number of the optimizer step, from 1.
            batch: file of rollouts and columns.
            trace: trace directory.
            first: the weights are those that made the `old` log-probabilities.
            last: no other update of this step follows.
            oracle: folder in which the oracle finds gradients, weights and moments; None for a step that it skips.
        """
        config = self._config
        rollouts, columns = load_rollouts(Path(batch))
        groups = groups_of(self._optimizer, known=can_audit(config))
        rate = max(float(item.learning_rate) for item in groups)
        name, meter, probe = f"update {number}", LossMeter(rows=trace is not None), self._recorder(trace)
        given, at = contextlib.nullcontext(), config.mesh.coordinate(self._context.rank)
        look: step_megatron.OnShards | None = None
        hand_on, audit, gradients = None, None, dict[str, str]()
        if oracle is not None:
            hand_on = self._hand_on(oracle)
            sent_first = self._sent_first == step - 1 and isinstance(self._sync, WeightSync)
            hand_on.before(number, first=first, probe=probe if sent_first else None, version=step - 1)

        def on_gradients() -> None:
            gradients.update(update_facts_megatron.gradient_digests(self._trainer))
            if hand_on is not None:
                hand_on.gradients(number)
            if audit is not None:
                audit.gradients()

        if probe is not None:
            self._record_resume(probe)
            if self._turns is not None:
                self._turns.record(probe, step)
            look = TokenProbe(probe, self._config.mesh, self._context.rank, name, step, rollouts)
            given = watched(probe, self._trainer, config, name, step)
            if can_audit(config):
                audit = self._audits.of(number, name)
                look = audit.seen(look)
            if first and at.tp == at.cp == at.dp == 0:  # one rank of each pipeline stage
                record_provider(probe, self._trainer.provider, self._trainer.chunks)
            if first and self._context.rank == 0:
                record_stated(probe, self._source)
        profiled = update_facts_megatron.profiler(config, step, number, self._context.rank)
        told = None if oracle is None else Path(oracle) / f"routes-{number}" / f"{self._context.rank:04d}.npy"
        with given, profiled, self._routes.during(rollouts, Path(batch).stem, name, look, told) as look:
            result = step_megatron.train_step(
                self._trainer, self._optimizer, rollouts, loss=policy_loss(*self._loss, meter), columns=columns,
                scheduler=self._scheduler, scheduler_step=1, temperature=self._temperature, on_shards=look,
                on_gradients=on_gradients, **self._batching,
            )  # fmt: skip
        self._saves.trained = step
        if hand_on is not None:
            hand_on.after(number, probe if last and self._sync is not None else None, step)
        memory = update_facts_megatron.peak_memory(self._spec.tier)
        said = update_log.RankUpdate(
            step=step, number=number, batch=Path(batch).name, first=first, mesh=config.mesh.label(), steps=config.steps,
            loss=result.loss, grad_norm=result.grad_norm, peak_memory=memory, gradients=gradients,
        )  # fmt: skip
        update_log.append(config.run, self._context.rank, said)
        facts = meter.read(counts=at.tp == 0, device=step_megatron.device_of(self._trainer))
        if probe is not None:
            self._routes.record(probe, step, Path(batch).stem)
            probe.emit(KnobsReached(name=name, version=step, values=self._reached()))
            records = UpdateRecords(probe=probe, config=config, step=step, number=number)
            records.record_step(
                result, self._optimizer, self._scheduler, groups=groups, sampled=hand_on is not None
            )  # fmt: skip
            if audit is not None:
                audit.record(probe, step, result.grad_norm, str(at))
            if at.tp == 0:
                records.record_rows(meter, str(at), oracle)
            if config.algorithm == "grpo":
                self._passes.record(probe, step, self._frozen, self._begun, at)
                self._begun = {}
                records.record_ratios(facts, first=first)
            if last:
                self._record_weights(probe, step, number)
                if self._sync is None:
                    self._close_recorder()
        found = update_facts_megatron.metrics_of_update(result, facts, policy=config.algorithm == "grpo")
        return found | {
            "learning_rate": rate, "tokens": sum(map(len, rollouts)), "peak_memory_gib": memory / 2**30,
        }  # fmt: skip

    def _record_weights(self, probe: Recorder, step: int, number: int) -> None:
        if self._adapters is not None:
            self._adapters.record_update(probe, step, begins=step == 1)
            return
        self._left = Kept()
        with self._audits.left_ungathered(number + 1), step_megatron.params_synced(self._trainer):
            self._live.record(self._left, step, UpdatedShard)
        self._left.record(probe)

    def connect(self, sockets: list[str], transport: str) -> str:
        """Connect to the engines that sample, or to their new processes; rank 0 returns why one is gone, if it is."""
        rank, adapters, engine = self._context.rank, self._adapters, self._config.engine
        judged = self._config.verify.steps
        if self._sync is None and adapters is not None and self._config.lora.sync == "adapter":
            self._sync = AdapterSync(adapters, self._source, rank, self._config.run / "adapters", judged=judged)
        elif self._sync is None:
            live = self._live if cuts_exports(self._config, self._spec.tier, self._source.num_bytes) else None
            resumed = bool(self._saves.trained)
            self._sync = WeightSync(self._trainer, self._source, rank, adapters, live, resumed=resumed, judged=judged)
        self._sync.connect(sockets, engine, transport, self._spec.collective_deadline_s)
        if engine.sleep_level and isinstance(self._sync, WeightSync):
            facts = self._state if self._config.verify.steps else None
            self._turns = Turns(self._sync, step_megatron.device_of(self._trainer), self._tensors, facts)
        return self._sync.lost

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from state_tensors(self._trainer, self._optimizer)
        yield from self._reference

    def sync(
        self, version: int, trace: str | None, running: Running = "none", again: bool = False, first: bool = False
    ) -> tuple[str, dict[str, float], str]:
        """Send the weights, or the adapter, to the engine as a version.

        Args:
            version: of the weights.
            trace: trace directory; None records nothing.
            running: requests of the engine meanwhile, and what becomes of their keys and values; none with an adapter.
            again: the engine died in this sync before.
            first: the trace is of the step that these weights sample, and not of the one that made them.

        Returns:
            On rank 0, why the engine refused them, empty if it did not; metrics; why its process is gone, empty if not.
        """
        assert self._sync is not None
        refused = self._sync.sync(version, trace, self._recorder(trace), running, again=again, first=first)
        if first:
            self._sent_first = version
        else:
            self._close_recorder()
        facts = {**self._sync.facts, **({} if self._turns is None else self._turns.facts)}
        return refused, facts, self._sync.lost

    def look(self, version: int, trace: str) -> str:
        """Record what engines hold, beside the weights of a version; rank 0 returns why one is gone, empty if not."""
        assert self._sync is not None
        self._sync.look(version, Path(trace))
        return self._sync.lost

    def evaluate(self, batch: str) -> list[bool]:
        """Tell for each rollout of a batch whether greedy decoding gives every token of its loss mask."""
        return update_facts_megatron.greedy_answers(self._trainer, load_rollouts(Path(batch))[0], **self._batching)

    def export(self, folder: str, version: int, trace: str | None) -> None:
        """Write the weights, a version, as a Hugging Face checkpoint: adapters merged, and alone."""
        self._say(f"exporting to {folder}")
        final = FinalExport(self._trainer, self._source, self._whole, self._adapters, self._context.rank, version)
        with contextlib.nullcontext() if trace is None else contextlib.closing(self._new_recorder(trace)) as probe:
            final.write(Path(folder), self._config.run / "adapter", probe, self._left)

    def _hand_on(self, folder: str) -> HandOn:
        """Writer of this rank's part of what the oracle reads."""
        return HandOn(
            self._trainer, self._optimizer, self._live, self._context.rank, Path(folder), self._source, self._adapters,
        )  # fmt: skip

    def _record_resume(self, probe: Recorder) -> None:
        """Record, with the first step after a start, what was loaded, and after a resume what was saved."""
        self._loaded.hand_over(probe)
        self._saves.record(probe)

    @contextlib.contextmanager
    def _weights_of(self, which: str) -> Iterator[None]:
        """Put the reference's weights in the place of the live ones, if it is asked for, and put these back."""
        if which != "reference":
            yield
            return
        with step_megatron.params_synced(self._trainer), replaced(self._live, self._reference):
            yield

    def _recorder(self, trace: str | None) -> Recorder | None:
        """Recorder of a step's trace, which all of its updates share."""
        if self._probe is not None and (trace is None or self._probe.path != Path(trace)):
            self._close_recorder()
        if trace is not None and self._probe is None:
            self._probe = self._new_recorder(trace)
        return self._probe

    def _new_recorder(self, trace: str) -> Recorder:
        return Recorder(Path(trace), "trainer", self._context.rank)

    def _close_recorder(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _reached(self) -> dict[str, str]:
        return found(settings_of(*self._parts))

    def _say(self, text: str) -> None:
        if self._context.rank == 0:
            self._context.progress(text)
