"""The controller of a training run: it owns the whole batch, calls the ranks, builds on nothing that did not hold."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from safetensors.numpy import load_file

from verifier.config.training import TrainConfig
from verifier.core.outputs import full_disk_refused
from verifier.core.records_policy import LossTerms
from verifier.core.records_trainer import KnobsAsked, OptimizerSettings
from verifier.core.store import Recorder, complete, create
from verifier.data.rollout_file import load_rollouts
from verifier.engine.process import EngineProcess
from verifier.errors import ContractError, InternalError, UsageError, ViolationFound
from verifier.launch.fork_launcher import ForkLauncher
from verifier.model.families import moe_layers_of
from verifier.platform.upstream_fixes import selected
from verifier.runs.model_under_test import ModelUnderTest, open_model
from verifier.runs.resources import Deadline, Resources
from verifier.runs.spec import place
from verifier.trainer.batches import HeldOut, OptimizerUpdate, SftPlan, UpdatePlan
from verifier.trainer.continuation import Continuation
from verifier.trainer.fitting import require_fit
from verifier.trainer.generation import EngineRollouts, Sampler
from verifier.trainer.grpo_plan import GrpoPlan, RecordedRollouts
from verifier.trainer.metrics import metrics_of
from verifier.trainer.ranks import PRELOAD, Launcher, start_ranks
from verifier.trainer.run_folder import RunFolder, opened
from verifier.trainer.sampled_step import SampledStep, is_sampled, record_scored, require_judgeable
from verifier.trainer.step_trace import step_manifest
from verifier.trainer.upstream_fields import asked
from verifier.trainer.worker_spec import loss_terms, optimizer_settings

if TYPE_CHECKING:
    from verifier.trainer.cluster_ray import Cluster, ClusterEngine

Progress = Callable[[str], None]
JUDGED_BEHIND = 2
"""Steps that may have been trained and not yet judged."""
ENGINE_DEADLINE_S = 600.0
"""Seconds that the engine may take for one request."""
JUDGE_DEADLINE_S = 600.0
"""Seconds that the judge of one step may take."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Verdict on the trace of one step."""

    exit_code: int
    text: str
    """The report."""


class Judge(Protocol):
    """Judges traces of steps in a process of its own."""

    def submit(self, trace: Path) -> Future[Judged]:
        """Begin to judge a trace."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """End of a run that was trained whole."""

    steps: int
    loss: float
    """Loss of the last step, nats."""
    accuracy: float | None
    """Share of held-out problems that greedy decoding solves; None without evaluation."""
    judged: int
    """Steps that were judged, all of which held."""
    resumed_from: int = 0
    """Step of the checkpoint that it was continued from; 0 for a run from its beginning."""
    finished_before: bool = False
    """The folder held the whole run already: nothing was trained."""


class Trainer:
    """One run of a config, from an empty folder, or its last checkpoint, to the exported weights.

    Args:
        config: of the run.
        progress: called with a line of text.
        judge: judges each step's trace; None trains without evidence.
        launcher: one whose owner ends it, with Megatron imported; None starts one.
        resources: starts the engine, and ends it; None starts one for this run.
        within: see `WorkerSpec.within`.
        whole_answers: see `EngineRollouts`.
    """

    def __init__(
        self,
        config: TrainConfig,
        progress: Progress,
        judge: Judge | None = None,
        *,
        launcher: Launcher | None = None,
        resources: Resources | None = None,
        within: Sequence[str] = (),
        whole_answers: bool = False,
    ) -> None:
        self._config, self._progress, self._judge = config, progress, judge
        self._launcher, self._within, self._whole_answers = launcher, within, whole_answers
        self._pending: deque[tuple[int, Future[Judged]]] = deque()
        self._num_judged = 0
        self._rollouts: EngineRollouts | None = None
        self._held_out: HeldOut | None = None
        self._resources, self._owns_resources = resources, resources is None
        self._cluster: Cluster | None = None
        self._sync_facts: dict[str, float] = {}

    def run(self) -> TrainSummary:
        """Train.

        Raises:
            UsageError: something that the user can mend, before anything is started.
            ViolationFound: a step did not hold; nothing was built on it.
            VerifierError: a process died or hung.
        """
        config = self._config
        until = Deadline(config.timeout_s)
        model = open_model(config.model, config.dtype, config.mesh)
        require_fit(config, model.checkpoint.config, model.tier)
        plan = self._plan_of(model)
        with opened(config) as folder, full_disk_refused(folder.path), contextlib.ExitStack() as stack:
            self._folder, self._model, self._until = folder, model, until
            self._metrics = stack.enter_context(metrics_of(folder))
            if (ended := folder.finished(config.steps)) is not None:
                return TrainSummary(**ended, finished_before=True)
            self._continuation = Continuation(config, folder, self._progress)
            done, metrics = self._continuation.rewind()
            self._updates = self._continuation.updates
            folder.write_config(config)
            launcher = self._open_launcher(stack)
            if config.verify.steps and config.verify.every:
                self._oracle = self._on_this_host(launcher, stack).oracle(model.checkpoint.path, until)
            engine = self._start_engine(model, launcher, stack)
            self._job = start_ranks(config, model, launcher, folder.path, until, self._progress, within=self._within)
            stack.callback(self._job.kill)
            effective = self._continuation.load(self._call)
            folder.write("effective.json", json.dumps(effective, indent=1, sort_keys=True) + "\n")
            if engine is not None and self._rollouts is not None:
                self._connect(engine, self._rollouts, stack)
                if done or not self._owns_resources:
                    self._sync(done, None)  # it may hold the weights of another step, or of another run
            summary = self._train(plan, done, metrics)
            self._export()
            self._job.finish()
            folder.finish(config.steps, steps=summary.steps, loss=summary.loss, accuracy=summary.accuracy)
        return summary

    def _open_launcher(self, stack: contextlib.ExitStack) -> Launcher:
        """The launcher that was given, or one that imports Megatron while the caller goes on."""
        config, until = self._config, self._until
        if self._launcher is not None:
            return self._launcher
        if config.ray.use:
            from verifier.trainer.cluster_ray import joined

            if config.ray.nodes > 1 and self._model.tier == "cuda":
                raise UsageError(f"ray.nodes is {config.ray.nodes}: several nodes are for the CPU tier so far, use 1")
            self._progress(f"starting Ray ({config.ray.address})")
            self._cluster = stack.enter_context(joined(config.ray, config.run, config.mesh.world_size))
            self._progress("importing Megatron")
            self._cluster.load(PRELOAD, until.left("importing Megatron"))
            return self._cluster
        self._progress("importing Megatron")
        return stack.enter_context(ForkLauncher(preload=PRELOAD, load_deadline_s=until.left("importing Megatron")))

    def _call(self, name: str, **arguments: Any) -> list[Any]:
        return self._job.call(name, self._until.left(f"`{name}` was called"), **arguments)

    def _plan_of(self, model: ModelUnderTest) -> UpdatePlan:
        """Open the data of the run; everything that can be refused is refused here."""
        config = self._config
        require_judgeable(config, model)
        batch_of = RunFolder(config.run).batch
        if config.algorithm == "sft":
            plan = SftPlan(config, model.checkpoint, batch_of)
            self._held_out = plan.held_out if plan.held_out.examples else None
            return plan
        routed = moe_layers_of(model.checkpoint.config) if config.grpo.replay_routes else ()
        if config.data.rollouts is not None:
            return GrpoPlan(config, RecordedRollouts(config, model.checkpoint), batch_of, routed)
        self._rollouts = EngineRollouts(config, model.checkpoint, whole_answers=self._whole_answers)
        return GrpoPlan(config, self._rollouts, batch_of, routed)

    def _start_engine(
        self, model: ModelUnderTest, launcher: Launcher, stack: contextlib.ExitStack
    ) -> EngineProcess | ClusterEngine | None:
        """Start the engine that samples, if the run has one, while Megatron is imported."""
        if self._rollouts is None:
            return None
        config = self._config
        self._placement = place(config, model.tier)
        self._progress(f"starting the engine ({config.engine.kind})")
        asked = self._rollouts.engine_config(self._placement.engine_gpus, sorted(selected(config.fixes)))
        if self._cluster is not None:
            return self._cluster.engine(asked, self._until.left("the engine was started"), ENGINE_DEADLINE_S)
        return self._on_this_host(launcher, stack).engine(asked, self._until).process

    def _on_this_host(self, launcher: Launcher, stack: contextlib.ExitStack) -> Resources:
        """Engines and oracle of this host, each started when it is first asked for."""
        if self._resources is None:
            self._resources = stack.enter_context(
                Resources(launcher=launcher if isinstance(launcher, ForkLauncher) else None)
            )
        return self._resources

    def _connect(
        self, engine: EngineProcess | ClusterEngine, rollouts: EngineRollouts, stack: contextlib.ExitStack
    ) -> None:
        """Wait for the engine, and let controller and ranks talk to it."""
        client: Sampler = engine if not isinstance(engine, EngineProcess) else stack.enter_context(
            contextlib.closing(engine.client(ENGINE_DEADLINE_S))
        )  # fmt: skip
        stack.callback(rollouts.close)
        rollouts.start(client)
        self._call("connect", socket=str(engine.socket_path), transport=self._placement.transport)

    def _train(self, plan: UpdatePlan, done: int, metrics: dict[str, Any]) -> TrainSummary:
        config, step, loss = self._config, done, metrics.get("loss", float("nan"))
        while step < config.steps and metrics.get("accuracy", -1.0) < config.evaluation.stop_above:
            step += 1
            started = time.monotonic()
            trace = self._begin_trace(step) if self._judge is not None else None
            sampled = None
            with self._controller_probe(trace, step) as probe:
                updates = plan.updates(step, self._updates, self._score, probe)
                resumed = bool(updates) and self._continuation.record(probe, step)
                if updates and probe is not None and is_sampled(config, step):
                    sampled = SampledStep(config, self._model, self._oracle, self._folder.oracle(step), step)
                    if plan.scored is not None:
                        record_scored(probe, config, step, plan.scored)
                self._manifest = step_manifest(
                    config, self._model, step, resumed=resumed, sampled=sampled is not None, dropped=not updates
                )  # fmt: skip
            rolled_s = time.monotonic() - started
            folder = None if sampled is None else str(sampled.folder)
            reports = [self._take(update, trace, folder, last=update is updates[-1]) for update in updates]
            self._updates += len(updates)
            trained_s = time.monotonic() - started - rolled_s
            if self._rollouts is not None and updates:
                self._sync(step, trace)
            synced_s = time.monotonic() - started - rolled_s - trained_s
            if trace is not None:
                if sampled is not None:
                    sampled.judge(trace, updates, [report["learning_rate"] for report in reports], plan.scored)
                self._submit(step, trace)
                waits = self._rollouts is not None or sampled is not None
                self._settle(step if waits else step - JUDGED_BEHIND)
            times = {"prepare_s": rolled_s, "train_s": trained_s, "sync_s": synced_s, **self._sync_facts}
            metrics = {"step": step, **_mean_of(reports), **plan.facts, **times, "time_s": time.monotonic() - started}
            loss = metrics.get("loss", loss)
            if config.evaluation.every and step % config.evaluation.every == 0:
                metrics |= self._evaluate(step)
            self._metrics.add(metrics)
            self._show(metrics)
            if self._continuation.is_due(step):
                self._save(step)
            self._continuation.finish(self._call, wait=False)
        self._save(step)
        self._continuation.finish(self._call, wait=True)
        accuracy = metrics.get("accuracy")
        if accuracy is None:
            accuracy = self._evaluate(step).get("accuracy")
        return TrainSummary(steps=step, loss=loss, accuracy=accuracy, judged=self._num_judged, resumed_from=done)

    def _save(self, step: int) -> None:
        """Begin a checkpoint, once every step up to it has been judged."""
        self._settle(step)
        self._continuation.begin(self._call, step, self._updates)

    def _take(self, update: OptimizerUpdate, trace: Path | None, oracle: str | None, *, last: bool) -> dict[str, float]:
        """Have the ranks take one optimizer step."""
        report: dict[str, float] = self._call(
            "train", step=update.step, number=update.number, batch=str(update.file),
            trace=None if trace is None else str(trace), first=update.first, last=last,
            oracle=oracle,
        )[0]  # fmt: skip
        return report

    def _sync(self, version: int, trace: Path | None) -> None:
        """Send the weights to the engine; raise a ContractError if it refused them and no judge will say why."""
        where = None if trace is None else str(trace)
        refused, self._sync_facts = self._call("sync", version=version, trace=where)[0]
        if refused and trace is None:
            raise ContractError(f"the engine refused the weights of version {version}: {refused}")

    def _score(self, file: Path, which: str) -> list[np.ndarray]:
        """Log-probabilities of a batch by the live weights or by the reference's."""
        found = file.with_name(f"{file.stem}.{which}.safetensors")
        self._call("score", batch=str(file), which=which, to=str(found))
        lengths = [len(rollout) for rollout in load_rollouts(file)[0]]
        values = load_file(found)["logprobs"]
        found.unlink()  # the columns of the batch keep what the loss reads
        return np.split(values, np.cumsum(lengths)[:-1])

    def _begin_trace(self, step: int) -> Path:
        self._manifest = step_manifest(self._config, self._model, step)
        return create(self._folder.trace(step), self._manifest)

    @contextlib.contextmanager
    def _controller_probe(self, trace: Path | None, step: int) -> Iterator[Recorder | None]:
        if trace is None:
            yield None
            return
        with contextlib.closing(Recorder(trace, "controller", 0)) as probe:
            yield probe
            probe.emit(KnobsAsked(name="config", version=step, values=asked(self._config)))
            probe.emit(OptimizerSettings(name="Adam", version=step, **optimizer_settings(self._config)))
            probe.emit(LossTerms(name="loss", version=step, **loss_terms(self._config)))

    def _submit(self, step: int, trace: Path) -> None:
        assert self._judge is not None
        complete(trace, self._manifest)
        self._pending.append((step, self._judge.submit(trace)))

    def _settle(self, until: int) -> None:
        """Wait for the verdicts of all steps up to one; raise a ViolationFound for the first that does not hold."""
        while self._pending and self._pending[0][0] <= until:
            step, future = self._pending.popleft()
            try:
                judged = future.result(JUDGE_DEADLINE_S)
            except TimeoutError as problem:
                raise InternalError(f"the judge of step {step} did not answer in {JUDGE_DEADLINE_S:g} s") from problem
            self._num_judged += 1
            if judged.exit_code:
                raise ViolationFound(judged.text, judged.exit_code)

    def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the weights of a step on the held-out problems, if there are any."""
        if self._rollouts is not None:
            return self._rollouts.evaluate(step)
        if self._held_out is None:
            return {}
        file = self._folder.path / "batches" / "held-out.safetensors"
        if not file.exists():
            self._held_out.save(file)
        answers = self._call("evaluate", batch=str(file))[0]
        return {"accuracy": sum(answers) / len(answers)}

    def _export(self) -> None:
        folder = self._folder.exported
        aside = folder.with_name("hf_model.partial")
        shutil.rmtree(aside, ignore_errors=True)
        self._call("export", folder=str(aside))
        for file in self._model.checkpoint.path.iterdir():  # the tokenizer, and what else belongs to the model
            if file.suffix != ".safetensors" and not (aside / file.name).exists():
                shutil.copy(file, aside)
        shutil.rmtree(folder, ignore_errors=True)
        aside.rename(folder)

    def _show(self, metrics: dict[str, Any]) -> None:
        text = f"step {metrics['step']}: no token in the loss"
        if "loss" in metrics:
            text = f"step {metrics['step']}: loss {metrics['loss']:.4f}, gradient norm {metrics['grad_norm']:.3f}"
        for name in ("reward", "held_out_reward", "accuracy"):
            if name in metrics:
                text += f", {name.replace('_', ' ')} {metrics[name]:.3f}"
        self._progress(text)


def _mean_of(reports: Sequence[dict[str, float]]) -> dict[str, float]:
    """Mean of each number over the updates of a step; the greatest for what is a greatest, the sum for tokens."""
    found = {}
    for name in reports[0] if reports else ():
        values = [report[name] for report in reports]
        total = sum(values)
        if name in ("ratio_gap", "peak_memory_gib"):
            found[name] = max(values)
        else:
            found[name] = total if name in ("num_tokens", "tokens") else total / len(values)
    return found
