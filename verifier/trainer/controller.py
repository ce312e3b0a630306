"""The controller of a training run: it starts ranks and engine, has the loop take the steps, and exports the end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, cast

from verifier.config.training import TrainConfig
from verifier.core.outputs import full_disk_refused, remove
from verifier.core.stage import Stage, in_stage
from verifier.engine.client import EngineGone
from verifier.launch.fork_launcher import ForkLauncher, Launcher
from verifier.platform import Tier
from verifier.platform.upstream_fixes import selected
from verifier.runs.derived_layout import with_run_layout
from verifier.runs.model_notes import notes_of
from verifier.runs.model_under_test import ModelUnderTest, open_model
from verifier.runs.resources import Deadline, Resources
from verifier.runs.spec import Placement, place
from verifier.trainer import model_files
from verifier.trainer.ahead import AheadRollouts
from verifier.trainer.batches import HeldOut, SftPlan, UpdatePlan
from verifier.trainer.checkpoint_folder import Continuation
from verifier.trainer.engines import RESTARTS, Engines, Revival, gone
from verifier.trainer.fitting import load_algorithms, require_fit
from verifier.trainer.generation import EngineRollouts
from verifier.trainer.grpo_plan import GrpoPlan, RecordedRollouts
from verifier.trainer.loop import StepLoop, TrainSummary
from verifier.trainer.metrics import View, metrics_of
from verifier.trainer.observer import SILENT, Observer, RunParts
from verifier.trainer.ranks import PRELOAD, start_ranks
from verifier.trainer.run_data import RunData, with_evaluation
from verifier.trainer.run_folder import RunFolder, opened

if TYPE_CHECKING:
    from verifier.runs.cluster_ray import Cluster

Progress = Callable[[str], None]


class Trainer:
    """One run of a config, from an empty folder, or its last checkpoint, to the exported weights.

    `progress` is called with a line of text, `observer` told of all that the run does, and `view`, if any, shows
    metrics as they come. `launcher` is one whose owner ends it, with Megatron imported, and `resources` start the
    engine and end it; None starts either for this run. See `WorkerSpec.within` and, for `whole_answers`,
    `EngineRollouts`.
    """

    def __init__(
        self,
        config: TrainConfig,
        progress: Progress,
        observer: Observer = SILENT,
        *,
        launcher: Launcher | None = None,
        resources: Resources | None = None,
        within: Sequence[str] = (),
        whole_answers: bool = False,
        view: View | None = None,
    ) -> None:
        self._config, self._progress, self._observer, self._view = config, progress, observer, view
        self._launcher, self._within, self._whole_answers = launcher, within, whole_answers
        self._rollouts: EngineRollouts | None = None
        self._ahead: AheadRollouts | None = None
        self._held_out: HeldOut | None = None
        self._data: RunData | None = None
        self._resources, self._owns_resources = resources, resources is None
        self._cluster: Cluster | None = None
        self._placement = Placement()
        self._tier: Tier = "cpu"

    def run(self) -> TrainSummary:
        """Train.

        Raises:
            UsageError: something that the user can mend, before anything is started.
            StackFailed: the stack failed.
            VerifierError: a process died or hung, or the observer ended the run.
        """
        config = self._config = with_evaluation(self._config)
        load_algorithms(config)
        self._until = until = Deadline(config.timeout_s)
        model = open_model(config.model, config.dtype, config.mesh, config.ray.nodes)
        require_fit(config, model.checkpoint.config, model.tier)
        plan, self._tier = self._plan_of(model), model.tier
        with opened(config) as folder, full_disk_refused(folder.path), contextlib.ExitStack() as stack:
            self._folder = folder
            stack.enter_context(self._observer.during(config, model, folder))
            line = stack.enter_context(metrics_of(folder, config, model, self._view))
            if (ended := folder.finished(config.steps)) is not None:
                self._observer.on_finished(folder, ended["steps"])
                return TrainSummary(**ended, finished_before=True)
            self._continuation = Continuation(config, folder, self._progress, self._observer)
            done, metrics = self._continuation.rewind()
            folder.write_config(config)
            if self._resources is None:
                own = self._launcher if isinstance(self._launcher, ForkLauncher) else None
                self._resources = stack.enter_context(Resources(launcher=own, preload=PRELOAD))
            resources, launcher = self._resources, self._open_launcher(self._resources, stack)
            if self._rollouts is not None:
                ranks_here = None if self._cluster is None else self._cluster.ranks_here
                self._placement = place(config, model.tier, ranks_here)
            gpus = self._placement.trainer_gpus
            model = with_run_layout(config, model, launcher, folder.path, until, self._progress, num_gpus=gpus)
            self._model = model
            self._observer.on_model(model, resources, until, self._progress)
            engine = self._start_engine(resources, stack)
            self._model = model = replace(model, notes=notes_of(model, launcher, until))
            with in_stage(Stage.LOAD):
                self._job = start_ranks(
                    config, model, launcher, folder.path, until, self._progress, within=self._within, num_gpus=gpus,
                    observer=self._observer.ranks,
                )  # fmt: skip
                stack.callback(self._job.kill)
                effective = self._continuation.load(self._job.call)
            self._continuation.restore(self._ahead)
            folder.write("effective.json", json.dumps(effective, indent=1, sort_keys=True) + "\n")
            loop = StepLoop(
                config=config, folder=folder, plan=plan, continuation=self._continuation, call=self._job.call,
                progress=self._progress, metrics=line, rollouts=self._rollouts, ahead=self._ahead,
                held_out=self._held_out, observer=self._observer,
            )  # fmt: skip
            if engine is not None and self._rollouts is not None:
                stack.callback(self._rollouts.close)
                with in_stage(Stage.ENGINE):
                    self._connect(engine, self._rollouts, loop)
                # It may hold the weights of another step, or of another run, or no adapter.
                other = bool(done) or not self._owns_resources or bool(engine.restarted)
                loop.sends_first = other or self._observer.judges
            self._observer.on_start(
                RunParts(
                    config=config, model=model, folder=folder, data=self._data, call=self._job.call, score=loop.score,
                    progress=self._progress, metrics=line, ahead=self._ahead, engines=loop.revival,
                    whole_answers=self._whole_answers, done=done, updates=self._continuation.updates,
                    has_loss="loss" in metrics,
                )
            )  # fmt: skip
            with in_stage(Stage.ROLLOUT):
                summary = loop.run(done, metrics)
            self._export(summary.steps)
            self._job.finish()
            folder.finish(config.steps, steps=summary.steps, loss=summary.loss, accuracy=summary.accuracy)
        return summary

    def _open_launcher(self, resources: Resources, stack: contextlib.ExitStack) -> Launcher:
        """The launcher that was given, or one that imports Megatron while the caller goes on."""
        config, until = self._config, self._until
        if self._launcher is not None:
            if config.ray.use:
                self._cluster = cast("Cluster", self._launcher)
            return self._launcher
        if config.ray.use:
            nodes = resources.on_nodes(config.ray, config.run, config.mesh.world_size, until, self._progress)
            self._cluster = stack.enter_context(nodes)
            return self._cluster
        self._progress("importing Megatron")
        return resources.launcher(until)

    def _plan_of(self, model: ModelUnderTest) -> UpdatePlan:
        """Open the data of the run; everything that can be refused is refused here."""
        config = self._config
        observer, batch_of = self._observer, RunFolder(config.run).batch
        observer.on_config(config, model)
        if config.algorithm == "sft":
            plan = SftPlan(config, model.checkpoint, batch_of, observer)
            self._data = plan.data
            self._held_out = plan.held_out if plan.held_out.examples else None
            return plan
        if config.data.rollouts is not None:
            return GrpoPlan(config, RecordedRollouts(config, model.checkpoint), batch_of, observer)
        self._rollouts = EngineRollouts(config, model.checkpoint, whole_answers=self._whole_answers, observer=observer)
        self._data = self._rollouts.data
        if config.grpo.mode == "sync":
            return GrpoPlan(config, self._rollouts, batch_of, observer)
        self._ahead = AheadRollouts(config, self._rollouts, self._until)
        return GrpoPlan(config, self._ahead, batch_of, observer)

    def _start_engine(self, resources: Resources, stack: contextlib.ExitStack) -> Engines | None:
        """Start the engine that samples, if the run has one, while Megatron is imported."""
        if self._rollouts is None:
            return None
        config = self._config
        self._progress(f"starting the engine ({config.engine.kind})")
        fixes, places = sorted(selected(config.fixes)), self._placement.engine_gpus
        lent = self._placement.transport == "ipc" and not config.engine.sleep_level
        asked = [
            self._rollouts.engine_config(gpus, fixes, number, tier=self._tier, lent=lent)
            for number, gpus in enumerate(places)
        ]
        engine = Engines(
            asked, self._cluster or resources, self._until, self._rollouts.deadline_s, self._progress,
            restarts=RESTARTS if self._placement.transport == "gloo" else 0,
        )  # fmt: skip
        stack.callback(engine.close)
        return engine

    def _connect(self, engine: Engines, rollouts: EngineRollouts, loop: StepLoop) -> None:
        """Let controller and ranks talk to the engine, and to those that it is started as again."""

        def connect() -> None:
            rollouts.start(engine.client())
            lost = self._job.call("connect", sockets=engine.sockets, transport=self._placement.transport)[0]
            if (problem := gone(lost)) is not None:
                raise problem

        loop.revival = rollouts.revival = Revival(engine, connect, lambda version: loop.sync(version, None))
        try:
            connect()
        except EngineGone as problem:
            loop.revival.revive(problem)

    def _export(self, step: int) -> None:
        """Export the weights of the last step; they are the run's once the observer has let them pass."""
        folder, source = self._folder.exported, self._model.checkpoint.path
        aside = folder.with_name("hf_model.partial")
        remove(aside)
        note = self._observer.before_export(step)
        self._job.call("export", folder=str(aside), version=step, note=note)
        model_files.copy_files(source, aside)
        self._observer.on_export(step, source, aside)
        remove(folder)
        aside.rename(folder)
