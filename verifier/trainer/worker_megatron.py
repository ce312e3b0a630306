"""One trainer rank that serves the controller's calls: load, train, evaluate, export.

Turns on the same GPUs: the engine sleeps while the trainer steps, and the trainer's state is on the host while the
engine samples.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from verifier.algorithms.registry import load_plugins
from verifier.core.outputs import full_disk_refused
from verifier.core.stage import Stage, in_stage
from verifier.data.rollout import load_rollouts
from verifier.engine.sender import Running
from verifier.export import gather_megatron
from verifier.export.live_weights import LiveWeights
from verifier.launch.child import entered, resolve
from verifier.megatron import (
    checkpoint_megatron,
    lora_megatron,
    optimizer_megatron,
    router_order_megatron,
    step_megatron,
)
from verifier.megatron.memory import peaks
from verifier.megatron.offload_megatron import HostState, state_tensors
from verifier.megatron.policy_loss_megatron import LossMeter, policy_loss
from verifier.megatron.step_megatron import OnShards, StepResult
from verifier.megatron.vocab_logprob import shortfall
from verifier.model import provider_megatron
from verifier.model.checkpoint import open_checkpoint
from verifier.trainer import update_facts_megatron, update_log
from verifier.trainer.batches import SCORED
from verifier.trainer.fitting import refused_for_memory
from verifier.trainer.observer import Note, RankObserver, RankParts, Update
from verifier.trainer.ranks import CALLS, WorkerSpec, loss_of
from verifier.trainer.state_megatron import (
    Facts,
    data_parallel_of,
    effective_settings,
    elements_of,
    reference_facts,
    replaced,
    settings_of,
    state_facts,
    write_saved,
)
from verifier.trainer.update_facts_megatron import TrainingRoutes
from verifier.trainer.upstream_fields import found, provider_overrides
from verifier.trainer.weight_sync_megatron import Adapters, WeightSync, spec_of

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext


def run(context: RankContext) -> None:
    """Rank function of a training run."""
    spec = WorkerSpec.from_json(context.args)
    router_order_megatron.install()
    with contextlib.ExitStack() as stack:
        stack.enter_context(entered(spec.within, spec, context))
        worker = TrainerWorker(spec, context)
        context.serve({name: partial(worker.answer, name) for name in CALLS})


class TrainerWorker:
    """Model, optimizer and scheduler of one rank. Every public method is a collective, and an answer to a call."""

    def __init__(self, spec: WorkerSpec, context: RankContext) -> None:
        self._spec, self._context = spec, context
        self._config = config = spec.config
        load_plugins(config.plugins)
        self._observer: RankObserver = resolve(spec.observer)() if spec.observer else RankObserver()
        self._sync: WeightSync | None = None
        self._turns: Turns | None = None
        self._adapters: Adapters | None = None
        self._reference: list[torch.Tensor] = []
        self._trained = 0
        """Last step in which the rank took an update; 0 before the first."""
        batch = config.batch
        self._batching: dict[str, Any] = {"micro_batch_size": batch.count, "max_tokens": batch.max_tokens}
        self._loss = loss_of(config)
        self._temperature = 1.0 if config.algorithm == "sft" else config.grpo.temperature

    def answer(self, name: str, **arguments: Any) -> Any:
        """Answer a call, in its turn on the GPUs."""
        turn = contextlib.nullcontext() if self._turns is None else self._turns.taken(name)
        at = CALLS[name] if name != "observe" else Stage[arguments.pop("stage")]
        stage = in_stage(at, int(arguments.get("step", arguments.get("version", self._trained))))
        with turn, refused_for_memory(self._config, self._spec.tier, self._context.rank, name), stage:
            return getattr(self, name)(**arguments)

    def load(self, resume: str | None = None, same_mesh: bool = True) -> dict[str, Any]:
        """Build the model, load its weights and make a new optimizer, or take those of a run's checkpoint, if named.

        Rank 0 returns its effective settings.
        """
        spec, config = self._spec, self._config
        self._say(f"loading {config.mesh.world_size} trainer ranks ({config.mesh.label()})")
        checkpoint_megatron.seed_all(provider_megatron.stage_seed(config.seed, config.mesh, self._context.rank))
        lora = spec_of(config.lora)
        self._trainer = provider_megatron.build(
            spec.checkpoint, config.mesh, dtype=config.dtype, tier=spec.tier,
            data_parallel=data_parallel_of(config.megatron), overrides=provider_overrides(config),
            seed=config.seed, deadline_s=spec.deadline_s, fixes=spec.fixes,
            adapt=None if lora is None else partial(lora_megatron.attach, lora=lora),
        )  # fmt: skip
        settings = optimizer_megatron.StepSettings(**spec.optimizer)
        self._optimizer = optimizer_megatron.make_optimizer(self._trainer, rule=settings)
        self._scheduler = optimizer_megatron.make_step_scheduler(self._optimizer, settings)
        self._source = open_checkpoint(spec.checkpoint)
        layout, rank = spec.layout_for(self._source), self._context.rank
        self._whole = self._live = LiveWeights(self._trainer.chunks, layout, config.mesh, rank)
        if lora is not None:
            self._adapters = Adapters(self._trainer, self._source, lora, rank, config.run / "adapters")
            self._live = self._adapters.trained
        self._reference = [item.clone() for _, _, item in self._live.tensors() if config.grpo.has_reference]
        self._parts = (self._trainer, self._optimizer, self._scheduler)
        self._writer = checkpoint_megatron.Writer(
            *self._parts, asynchronous=config.checkpoint.asynchronous, read_back=config.verify.steps
        )
        self._observer.on_build(
            RankParts(
                config=config, tier=spec.tier, rank=rank, trainer=self._trainer, optimizer=self._optimizer,
                scheduler=self._scheduler, settings=settings, source=self._source, whole=self._whole, live=self._live,
                adapters=self._adapters, reference=lambda: self._reference, state=self._state, knobs=self._reached,
            )
        )  # fmt: skip
        self._routes = TrainingRoutes(self._trainer, self._observer, replays=config.grpo.replay_routes)
        folder = None if resume is None else Path(resume)
        if folder is not None:
            self._say(f"loading the checkpoint {folder}")
            checkpoint_megatron.load(*self._parts, folder / "megatron", same_mesh=same_mesh)
            self._trained = int(folder.name)
        self._observer.on_load(folder, same_mesh=same_mesh)
        return {"knobs": self._reached(), **effective_settings(*self._parts[:2])} if rank == 0 else {}

    def _state(self) -> Facts:
        with step_megatron.params_synced(self._trainer):
            facts = state_facts(self._trainer, self._whole, self._optimizer, self._scheduler, self._context.rank)
        return [*facts, *reference_facts(self._reference, self._live)]

    def save(self, folder: str) -> None:
        """Begin to write a checkpoint: this rank's state, and what it held."""
        path, steps = Path(folder), optimizer_megatron.steps_of(self._optimizer)
        self._writer.begin(path / "megatron", self._observer.on_checkpoint(steps))
        lives = [self._live] if self._adapters is None else [self._adapters.base, self._live]
        with full_disk_refused(path):  # a look before the save would gather weights that the save itself does not
            elements = elements_of(*self._parts, lives, self._reference)
            write_saved(path, self._context.rank, self._state(), elements)

    def saved(self, folder: str, wait: bool) -> list[dict[str, Any]] | None:
        """Return what was read back of the checkpoint, once it is written; None before."""
        return self._writer.done(Path(folder) / "megatron", wait=wait)

    def score(self, batch: str, which: str, to: str) -> None:
        """Score a batch by the weights as they are, or by the reference; rank 0 writes the log-probabilities.

        `which` is "current" or "reference"; "greedy" and "shortfall" are of undivided logits by the weights as they
        are. The file `to` gets ``logprobs`` float32 over all tokens, nats, NaN for the first of each rollout.
        """
        rollouts, _ = load_rollouts(Path(batch))
        temperature = 1.0 if which == "greedy" else self._temperature
        read = shortfall if which == "shortfall" else None
        with self._weights_of(which):
            on_rows = self._observer.on_scores(which, Path(batch).stem, rollouts)
            with self._routes.during(rollouts, Path(batch).stem, SCORED.get(which, which)) as look:
                found = step_megatron.score(
                    self._trainer, rollouts, temperature=temperature, on_shards=look, on_rows=on_rows, read=read,
                    **self._batching,
                )  # fmt: skip
        if self._context.rank == 0:
            update_facts_megatron.write_logprobs(found, to)

    def train(
        self, step: int, number: int, batch: str, first: bool, last: bool, note: Note | None = None
    ) -> dict[str, float]:
        """Take one optimizer step on a batch of `save_rollouts`.

        If `first`, the weights are those that made the `old` log-probabilities; if `last`, no other update of this step
        follows.
        """
        config, at = self._config, self._config.mesh.coordinate(self._context.rank)
        rollouts, columns = load_rollouts(Path(batch))
        rate, gradients = max(float(group["lr"]) for group in self._optimizer.param_groups), dict[str, str]()
        update = Update(
            step=step, number=number, batch=Path(batch).stem, rollouts=rollouts, first=first, last=last, note=note
        )
        watch = self._observer.on_update(update)
        watch.before_passes(partial(self._some, update, columns))
        meter = LossMeter(rows=watch.keeps_rows)

        def on_gradients() -> None:
            gradients.update(update_facts_megatron.gradient_digests(self._trainer))
            watch.on_gradients()

        profiled = update_facts_megatron.profiler(config, step, number, self._context.rank)
        routed = self._routes.during(rollouts, update.batch, update.name, watch.on_batch)
        with watch.passes(), profiled, routed as look:
            result = step_megatron.train_step(
                self._trainer, self._optimizer, rollouts, loss=policy_loss(*self._loss, meter), columns=columns,
                scheduler=self._scheduler, scheduler_step=1, temperature=self._temperature, on_shards=look,
                on_gradients=on_gradients, **self._batching,
            )  # fmt: skip
        self._trained = step
        memory = peaks(self._spec.tier).peak
        said = update_log.RankUpdate(
            step=step, number=number, batch=Path(batch).name, first=first, mesh=config.mesh.label(), steps=config.steps,
            loss=result.loss, grad_norm=result.grad_norm, peak_memory=memory, gradients=gradients,
        )  # fmt: skip
        update_log.append(config.run, self._context.rank, said)
        facts = meter.read(counts=at.tp == 0, device=step_megatron.device_of(self._trainer))
        watch.on_optimizer_step(result, meter, facts)
        found = update_facts_megatron.metrics_of_update(result, facts, policy=config.algorithm == "grpo")
        further = {"further_loss": result.further_loss} if config.megatron.mtp_loss_scaling_factor else {}
        return found | further | {
            "learning_rate": rate, "tokens": sum(map(len, rollouts)), "peak_memory_gib": memory / 2**30,
        }  # fmt: skip

    def _some(
        self, update: Update, columns: Mapping[str, Sequence[Any]], places: Sequence[int], look: OnShards
    ) -> tuple[StepResult, Mapping[str, Any]]:
        """Compute the gradients that some rollouts have in an update, see `observer.SomeRollouts`."""
        rollouts, meter = [update.rollouts[at] for at in places], LossMeter(rows=True)
        picked = {name: [values[at] for at in places] for name, values in columns.items()}
        tokens, of_all = (sum(int(item.mask.sum()) for item in each) for each in (rollouts, update.rollouts))
        picked["weight"] = [values * (tokens / of_all) for values in picked["weight"]]  # by their own number divided
        with self._routes.during(rollouts, None, update.name, look) as routed:
            result = step_megatron.backward(
                self._trainer, rollouts, loss=policy_loss(*self._loss, meter), columns=picked,
                temperature=self._temperature, on_shards=routed, **self._batching,
            )  # fmt: skip
        return result, meter.rows()

    def connect(self, sockets: list[str], transport: str) -> str:
        """Connect to the engines that sample, or to their new processes; rank 0 returns why one is gone, if it is."""
        rank, adapters, engine = self._context.rank, self._adapters, self._config.engine
        if self._sync is None:
            given = self._config.lora.sync == "adapter"
            told = (self._trainer, self._source, rank, adapters, self._observer, self._config.run)
            self._sync = WeightSync(*told, given_adapters=given)
        self._sync.connect(sockets, engine, transport, self._spec.deadline_s)
        if engine.sleep_level:
            device = step_megatron.device_of(self._trainer)
            self._turns = Turns(self._sync, device, self._tensors, self._observer)
        return self._sync.lost

    def _tensors(self) -> Iterator[torch.Tensor]:
        yield from state_tensors(self._trainer, self._optimizer)
        yield from self._reference

    def sync(
        self, version: int, note: Note | None = None, running: Running = "none", again: bool = False,
        first: bool = False,
    ) -> tuple[str, dict[str, float], str]:  # fmt: skip
        """Send the weights, or the adapter, to the engine as a version; for the arguments see `WeightSync.sync`.

        Returns on rank 0 why the engine refused them, empty if it did not; metrics; why its process is gone, or empty.
        """
        assert self._sync is not None
        refused = self._sync.sync(version, note, running, again=again, first=first)
        facts = {**self._sync.facts, **({} if self._turns is None else self._turns.facts)}
        return refused, facts, self._sync.lost

    def observe(self, what: str, **arguments: Any) -> Any:
        """Have the observer answer one of the controller's, by a method of its own."""
        return getattr(self._observer, what)(**arguments)

    def evaluate(self, batch: str) -> list[bool]:
        """Tell for each rollout of a batch whether greedy decoding gives every token of its loss mask."""
        return update_facts_megatron.greedy_answers(self._trainer, load_rollouts(Path(batch))[0], **self._batching)

    def export(self, folder: str, version: int, note: Note | None = None) -> None:
        """Write the weights, a version, as a Hugging Face checkpoint: adapters merged, and alone."""
        self._say(f"exporting to {folder}")
        path, adapter = Path(folder), self._config.run / "adapter"
        self._observer.before_export(version, note)
        gather_megatron.save(self._trainer, path, whole=True)
        if self._adapters is not None:
            self._adapters.save(adapter)
        dist.barrier()
        self._observer.on_export(version, note, path, adapter)

    @contextlib.contextmanager
    def _weights_of(self, which: str) -> Iterator[None]:
        if which != "reference":
            yield
            return
        with step_megatron.params_synced(self._trainer), replaced(self._live, self._reference):
            yield

    def _reached(self) -> dict[str, str]:
        return found(settings_of(*self._parts))

    def _say(self, text: str) -> None:
        if self._context.rank == 0:
            self._context.progress(text)


STEPS = ("score", "train", "sync")
"""Calls that begin or go on with a step: the engine sleeps until the next transfer."""
VISITS = ("save", "export")
"""Calls between steps: the engine keeps its weights on the host meanwhile, and goes on afterwards."""


class Turns:
    """Turns of trainer and engine on the GPUs of one rank, the engine's first. Every method is a collective.

    Attributes:
        facts: metrics of the last time on the host.
    """

    def __init__(
        self, sync: WeightSync, device: torch.device, tensors: Callable[[], Iterable[torch.Tensor]],
        observer: RankObserver,
    ) -> None:  # fmt: skip
        self._sync, self._tensors, self._observer = sync, tensors, observer
        self._state, self._device = HostState(device), device
        self.facts: dict[str, float] = {}
        sync.before_caches = self.leave
        self.leave()

    def leave(self) -> None:
        """Move this rank's state to the host."""
        self._observer.on_offload()
        before = torch.cuda.memory_allocated(self._device)
        freed = self._state.leave(self._tensors())
        after = torch.cuda.memory_allocated(self._device)
        self.facts = {"offloaded_gib": freed / 2**30, "left_share": after / before}
        dist.barrier()

    def step(self) -> None:
        """Have the engine sleep until the next transfer, and bring the state back, unless it is there."""
        if self._state.is_away:
            self._sync.rest()
            self._come_back()

    @contextlib.contextmanager
    def visit(self) -> Iterator[None]:
        """Bring the state back for the body; the engine keeps its weights meanwhile."""
        if not self._state.is_away:
            yield
            return
        self._sync.rest(level=1)
        self._come_back()
        yield
        self.leave()
        self._sync.wake()

    def _come_back(self) -> None:
        self._state.come_back()
        self._observer.on_onload()

    @contextlib.contextmanager
    def taken(self, call: str) -> Iterator[None]:
        """Have the state here for the body, if a call of that name needs it."""
        if call in STEPS:
            self.step()
        with self.visit() if call in VISITS else contextlib.nullcontext():
            yield
