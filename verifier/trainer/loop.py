"""The order of a run's steps: sample, train, sync, evaluate, save."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from verifier.config.training import TrainConfig
from verifier.core import ragged
from verifier.data.rollout import load_rollouts
from verifier.engine.sender import Running
from verifier.errors import ContractError
from verifier.trainer.ahead import AheadRollouts
from verifier.trainer.batches import HeldOut, OptimizerUpdate, UpdatePlan
from verifier.trainer.checkpoint_folder import Call, Continuation
from verifier.trainer.engines import Revival, gone
from verifier.trainer.generation import EngineRollouts
from verifier.trainer.metrics import Metrics, line_of, mean_of
from verifier.trainer.observer import SILENT, Note, Observer
from verifier.trainer.run_folder import RunFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """End of a run that was trained whole."""

    steps: int
    loss: float | None
    """Loss of the last step, nats; None where no step had a token in it."""
    accuracy: float | None
    """Share of held-out problems that greedy decoding solves; None without evaluation."""
    resumed_from: int = 0
    """Step of the checkpoint that it was continued from; 0 for a run from its beginning."""
    finished_before: bool = False
    """The folder held the whole run already: nothing was trained."""


@dataclass(kw_only=True)
class StepLoop:
    """The steps of one run, whose ranks have loaded their weights and whose engine is connected.

    None stands for `rollouts` where no engine samples, for `ahead` where nothing is sampled while a step trains, for
    `held_out` where ranks decode no problems, and for `revival` where the engine's death ends the run. If
    `sends_first`, the engine gets the weights before the first step.
    """

    config: TrainConfig
    folder: RunFolder
    plan: UpdatePlan
    continuation: Continuation
    call: Call
    progress: Callable[[str], None]
    metrics: Metrics
    rollouts: EngineRollouts | None
    ahead: AheadRollouts | None
    held_out: HeldOut | None
    observer: Observer = SILENT
    revival: Revival | None = None
    sends_first: bool = False
    _sync_facts: dict[str, float] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._updates = self.continuation.updates

    def run(self, done: int, metrics: dict[str, Any]) -> TrainSummary:
        """Take the steps that are left.

        So many are `done`; `metrics` are of the last of them, empty for none.

        Raises:
            VerifierError: a process died or hung, or the observer ended the run.
        """
        config, step, loss = self.config, done, metrics.get("loss")
        while step < config.steps and metrics.get("accuracy", -1.0) < config.evaluation.stop_above:
            step += 1
            self.observer.on_step(step, sends_first=self.sends_first)
            self._send_first(step - 1, self.observer.note())
            begun = self._evaluate(0) if step == 1 and config.evaluation.every > 1 else {}
            metrics = {"step": step, **begun, **self._step(step)}
            loss = metrics.get("loss", loss)
            if config.evaluation.every and step % config.evaluation.every == 0:
                with self.observer.blaming(step):
                    metrics |= self._evaluate(step)
            self.metrics.add(metrics, self._lengths)
            if self.rollouts is not None:
                self.metrics.add_samples(step, self.rollouts.shown)
            self.progress(line_of(metrics))
            if self.continuation.is_due(step):
                self._save(step)
            self.continuation.finish(self.call, wait=False)
        self._send_first(step, None)
        self._save(step)
        self.continuation.finish(self.call, wait=True)
        accuracy = metrics.get("accuracy") if metrics.get("held_out_version", step) == step else None
        if accuracy is None:  # or of the evaluation before the only step
            accuracy = self._evaluate(step).get("accuracy")
        return TrainSummary(steps=step, loss=loss, accuracy=accuracy, resumed_from=done)

    def _step(self, step: int) -> dict[str, Any]:
        started, observer = time.monotonic(), self.observer
        if self.rollouts is not None and self.ahead is None:
            self.progress(f"step {step}: sampling answers, and scoring them")
        with observer.blaming(step - 1):
            updates = self.plan.updates(step, self._updates, self.score)
            observer.on_updates(step, updates)
        rolled = time.monotonic()
        observer.before_training(step)
        ready = time.monotonic()
        if updates:
            self.progress(f"step {step}: training")
        reports = [self._take(update, last=update is updates[-1]) for update in updates]
        self._updates += len(updates)
        trained = time.monotonic()
        if self.ahead is not None:
            self.ahead.pause()
        if self.rollouts is not None and updates:
            self.progress(f"step {step}: sending the weights to the engine")
            self.sync(step, observer.note())
        elif self.rollouts is not None and self.config.engine.sleep_level:
            self.sync(step, None)  # it fell asleep when the step was scored: the same weights wake it
        synced = time.monotonic()
        observer.on_step_end(step, reports)
        if self.ahead is not None:
            self.ahead.resume(step if updates else None)
        self._lengths = [len(item) for update in updates for item in update.rollouts]
        return {
            **mean_of(reports), **self.plan.facts, "prepare_s": rolled - started, "train_s": trained - ready,
            "sync_s": synced - trained, **self._sync_facts, "time_s": time.monotonic() - started,
        }  # fmt: skip

    def _save(self, step: int) -> None:
        self.observer.before_checkpoint(step)
        rollouts = [] if self.ahead is None else self.ahead.saved()
        self.continuation.begin(self.call, step, self._updates, rollouts)

    def _take(self, update: OptimizerUpdate, *, last: bool) -> dict[str, float]:
        report: dict[str, float] = self.call(
            "train", step=update.step, number=update.number, batch=str(update.file), first=update.first, last=last,
            note=self.observer.note(),
        )[0]  # fmt: skip
        return report

    def _send_first(self, version: int, note: Note | None) -> None:
        if self.sends_first:
            self.sends_first = False
            self.sync(version, note, first=note is not None)

    def sync(self, version: int, note: Note | None, first: bool = False) -> None:
        """Send the weights to the engine.

        The note is for the observers of the ranks; if `first`, it is of the step that these weights sample.

        Raises:
            ContractError: the engine refused them, and no note went with them, so that nobody will say why.
        """
        running: Running = "none"
        if self.ahead is not None and self.ahead.runs:
            running = "kept" if self.config.grpo.keep_kv_cache else "recomputed"
        if self.rollouts is not None:
            self.rollouts.sent.append(version)
        asked = {"version": version, "note": note, "first": first}
        refused, self._sync_facts, lost = self.call("sync", **asked, running=running)[0]
        while (problem := gone(lost)) is not None:
            if self.revival is None or (self.ahead is not None and self.ahead.runs):
                raise problem
            self.revival.revive(problem)
            refused, self._sync_facts, lost = self.call("sync", **asked, again=True)[0]
        if note is not None:
            self.observer.on_sync(version)
        elif refused:
            raise ContractError(f"the engine refused the weights of version {version}: {refused}")

    def score(self, file: Path, which: str) -> list[np.ndarray]:
        """Log-probabilities of a batch by the live weights or by the reference's."""
        found = file.with_name(f"{file.stem}.{which}.safetensors")
        self.call("score", batch=str(file), which=which, to=str(found))
        lengths = [len(rollout) for rollout in load_rollouts(file)[0]]
        values = load_file(found)["logprobs"]
        found.unlink()  # the columns of the batch keep what the loss reads
        return ragged.split(values, lengths)

    def _evaluate(self, step: int) -> dict[str, float]:
        if self.rollouts is not None or self.held_out is not None:
            self.progress(f"step {step}: evaluating")
        if self.rollouts is not None:
            return self.rollouts.evaluate(step)
        if self.held_out is None:
            return {}
        file = self.folder.held_out
        if not file.exists():
            self.held_out.save(file)
        answers = self.call("evaluate", batch=str(file))[0]
        self.observer.on_evaluation(step, None)
        return {"accuracy": sum(answers) / len(answers), "held_out_version": float(step)}
