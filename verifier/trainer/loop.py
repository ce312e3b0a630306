"""The order of a run's steps: sample, train, sync, judge, evaluate, save; builds on nothing that did not hold."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from safetensors.numpy import load_file

from verifier.config.training import TrainConfig
from verifier.core import ragged
from verifier.core.manifest import Facts
from verifier.core.record import Probe
from verifier.core.records_policy import LossTerms
from verifier.core.records_tokens import SampledNoise
from verifier.core.records_trainer import KnobsAsked, OptimizerSettings, PreviousStep
from verifier.core.store import Recorder, complete, create
from verifier.data.rollout_file import load_rollouts
from verifier.engine.sender import Running
from verifier.errors import ContractError
from verifier.oracle.oracle import Oracle
from verifier.runs.model_under_test import ModelUnderTest
from verifier.trainer.ahead import AheadRollouts
from verifier.trainer.batches import HeldOut, OptimizerUpdate, UpdatePlan
from verifier.trainer.continuation import Call, Continuation
from verifier.trainer.data_as_read import DataAsRead
from verifier.trainer.engines import Revival, gone
from verifier.trainer.evaluation import record_held_out
from verifier.trainer.generation import EngineRollouts
from verifier.trainer.metrics import Metrics, line_of, mean_of
from verifier.trainer.run_folder import RunFolder
from verifier.trainer.sampled_step import SampledStep, is_sampled, record_scored
from verifier.trainer.step_trace import step_manifest
from verifier.trainer.token_versions import has_fresh
from verifier.trainer.upstream_fields import asked
from verifier.trainer.verdicts import Suspicions, Verdicts
from verifier.trainer.worker_spec import loss_terms, optimizer_settings

JUDGED_BEHIND = 2
"""Steps of fine-tuning that may not be judged yet when the next is trained; of GRPO, none."""
HELD_OUT = "held-out.safetensors"
"""Held-out problems with their responses, in the folder of a run's batches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainSummary:
    """End of a run that was trained whole."""

    steps: int
    loss: float
    """Loss of the last step, nats."""
    accuracy: float | None
    """Share of held-out problems that greedy decoding solves; None without evaluation."""
    judged: int
    """Steps that were judged, none of which was violated."""
    suspicions: Suspicions
    """Open ones, which no later step has decided, and the number of dropped ones."""
    not_judged: Mapping[str, int] = field(default_factory=dict)
    """Sentences on what no check judged -> number of judged steps that each is true of."""
    resumed_from: int = 0
    """Step of the checkpoint that it was continued from; 0 for a run from its beginning."""
    finished_before: bool = False
    """The folder held the whole run already: nothing was trained."""


@dataclass(kw_only=True)
class StepLoop:
    """The steps of one run, whose ranks have loaded their weights and whose engine is connected.

    Args:
        config: of the run.
        model: of the run.
        folder: of the run.
        plan: makes the updates of a step.
        continuation: the run's checkpoints.
        call: calls a method of all ranks.
        progress: called with a line of text.
        metrics: of the run.
        verdicts: on each step's trace; without a judge the run trains without evidence.
        rollouts: sampled by the run's engine; None for a run without one.
        ahead: samples them while the step before theirs trains; None where that is not asked for.
        held_out: problems that the ranks decode; None for none.
        oracle: of the sampled steps; None for a run without them.
        data: of the run, as they were read; None for recorded rollouts.
        revival: of the engine; None where its death ends the run.
        sends_first: the engine gets the weights before the first step.
        noise: what the last step that measures it, or a measurement before the first, found the run's dtype to round.
    """

    config: TrainConfig
    model: ModelUnderTest
    folder: RunFolder
    plan: UpdatePlan
    continuation: Continuation
    call: Call
    progress: Callable[[str], None]
    metrics: Metrics
    verdicts: Verdicts
    rollouts: EngineRollouts | None
    ahead: AheadRollouts | None
    held_out: HeldOut | None
    oracle: Oracle | None
    data: DataAsRead | None = None
    revival: Revival | None = None
    sends_first: bool = False
    noise: SampledNoise | None = None
    _held: dict[int, Path] = field(default_factory=dict, init=False)
    _sync_facts: dict[str, float] = field(default_factory=dict, init=False)
    _evaluated: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._updates = self.continuation.updates

    def run(self, done: int, metrics: dict[str, Any]) -> TrainSummary:
        """Take the steps that are left.

        Args:
            done: number of steps that are done.
            metrics: of the last of them; empty for none.

        Raises:
            ViolationFound: a step did not hold; nothing was built on it.
            VerifierError: a process died or hung.
        """
        config, plan, step, loss = self.config, self.plan, done, metrics.get("loss", float("nan"))
        begins = not done
        self.last = PreviousStep(name="step", version=done, updated="loss" in metrics, here=False)
        while step < config.steps and metrics.get("accuracy", -1.0) < config.evaluation.stop_above:
            step += 1
            trace = self._begin_trace(step) if self.verdicts.judge is not None else None
            sent = trace is not None and self.sends_first
            self._send_first(step - 1, trace)
            begun = self._evaluate(0) if step == 1 and config.evaluation.every > 1 else {}
            started = time.monotonic()
            sampled = None
            if self.rollouts is not None and self.ahead is None:
                self.progress(f"step {step}: sampling answers, and scoring them")
            with self.verdicts.first(step - 1), self._controller_probe(trace, step) as probe:
                stored = probe is not None and self.continuation.record_stored(probe)
                if probe is not None and self.rollouts is not None and step > 1:
                    probe.emit(self.last)
                updates = plan.updates(step, self._updates, self._score, probe)
                self.continuation.record_states(probe)
                restarted = self._record_restarts(probe, trace, step) if updates else False
                resumed = bool(updates) and self.continuation.record(probe, step)
                examined = self.examine(probe, step - 1)
                evaluated = self._record_held_out(probe, step, first=step == done + 1)
                known = not (self.ahead is not None and done and step == done + 1)  # whose weights are gone
                due = is_sampled(config, step) or (self.ahead is None and self.verdicts.suspicions.open)
                if updates and probe is not None and self.oracle is not None and due and known:
                    sampled = SampledStep(config, self.model, self.oracle, self.folder.oracle(step), step)
                    if plan.scored is not None:
                        record_scored(probe, config, step, plan.scored)
                fresh = has_fresh(config, [item for update in updates for item in update.rollouts], step - 1)
                self._manifest = step_manifest(config, self.model, Facts(
                    step=step, updates=tuple(item.number for item in updates), sampled=sampled is not None,
                    loaded=begins and bool(updates), sent=sent, resumed=resumed, restarted=restarted, stored=stored,
                    evaluated=evaluated, examined=examined, fresh=fresh, text=plan.has_text, unread=plan.unread,
                    rewarded=plan.reads_rewards, noise=self._record_noise(probe, step, sampled, fresh),
                ))  # fmt: skip
            earlier = self._hold_weights(step) if self.ahead is not None else {}
            rolled_s = time.monotonic() - started
            self.verdicts.settle(step - 1 - (JUDGED_BEHIND if self.rollouts is None else 0))  # judged meanwhile
            waited_s = time.monotonic() - started - rolled_s
            folder = None if sampled is None else str(sampled.folder)
            if updates:
                self.progress(f"step {step}: training")
            reports = [self._take(update, trace, folder, last=update is updates[-1]) for update in updates]
            self._updates, begins = self._updates + len(updates), begins and not updates
            trained_s = time.monotonic() - started - rolled_s - waited_s
            if self.ahead is not None:
                self.ahead.pause()
            if self.rollouts is not None and updates:
                self.progress(f"step {step}: sending the weights to the engine")
                self.sync(step, trace)
                if self.revival is not None:
                    self.revival.recorded()
            elif self.rollouts is not None and self.config.engine.sleep_level:
                self.sync(step, None)  # it fell asleep when the step was scored: the same weights wake it
            synced_s = time.monotonic() - started - rolled_s - waited_s - trained_s
            if trace is not None:
                if sampled is not None:
                    self.progress(f"step {step}: transformers computes it too")
                    rates = [report["learning_rate"] for report in reports]
                    self.noise = sampled.judge(trace, updates, rates, plan.scored, earlier, self.noise) or self.noise
                complete(trace, self._manifest)
                self.verdicts.ask(step, trace)
                if self.ahead is not None or sampled is not None:
                    self.verdicts.settle(step)
            for weights in earlier.values():
                shutil.rmtree(weights.parent)
            if self.ahead is not None:
                self.ahead.resume(step if updates else None)
            times = {"prepare_s": rolled_s, "train_s": trained_s, "sync_s": synced_s, **self._sync_facts}
            times["time_s"] = time.monotonic() - started
            metrics = {"step": step, **begun, **mean_of(reports), **plan.facts, **times}
            loss = metrics.get("loss", loss)
            self.last = PreviousStep(name="step", version=step, updated=bool(updates), here=True)
            if config.evaluation.every and step % config.evaluation.every == 0:
                with self.verdicts.first(step):
                    metrics |= self._evaluate(step)
            self.metrics.add(metrics, [len(item) for update in updates for item in update.rollouts])
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
        return TrainSummary(
            steps=step, loss=loss, accuracy=accuracy, judged=self.verdicts.num_judged, resumed_from=done,
            not_judged=self.verdicts.not_judged,
            suspicions=self.verdicts.suspicions,
        )  # fmt: skip

    def _save(self, step: int) -> None:
        """Begin a checkpoint, once every step up to it has been judged."""
        self.verdicts.settle(step)
        rollouts = [] if self.ahead is None else self.ahead.saved()
        self.continuation.begin(self.call, step, self._updates, rollouts)

    def _record_held_out(self, probe: Recorder | None, step: int, *, first: bool) -> bool:
        """Record the problems of the evaluation, on the first step after a start and before each evaluation."""
        every = self.config.evaluation.every
        due = first or (every > 0 and step % every == 0)
        return probe is not None and self.data is not None and due and self.data.record_held_out(probe, step)

    def _record_noise(self, probe: Recorder | None, step: int, sampled: SampledStep | None, fresh: bool) -> bool:
        """Record the last measured noise beside a step that measures none; True if there is one.

        A sampled step measures it on fresh tokens; without any it repeats the last one by itself.
        """
        if sampled is None and self.noise is not None and probe is not None:
            probe.emit(msgspec.structs.replace(self.noise, version=step))
        measures = sampled is not None and (fresh or self.rollouts is None or self.model.dtype == "float32")
        return measures or self.noise is not None

    def examine(self, probe: Probe | None, version: int) -> bool:
        """Record the last evaluation, if no trace has it, beside scores by the weights; tell whether there was one."""
        if probe is None or self.config.engine.quantization:
            return False
        batches = self.folder.path / "batches"
        if self.rollouts is not None:
            file = batches / "evaluation.safetensors"
            return self.rollouts.record_evaluated(probe, version, self._score, file)
        if self.held_out is not None and self._evaluated:
            record_held_out(probe, version, self.held_out, batches / HELD_OUT)
        recorded, self._evaluated = self.held_out is not None and self._evaluated, False
        return recorded

    def _hold_weights(self, step: int) -> Mapping[int, Path]:
        """Have the ranks write the weights before a step; return those that the oracle may need in it, by version."""
        last = self._held.pop(step - 2, None)
        found = {} if last is None else {step - 2: last}
        if self.verdicts.judge is not None and self.oracle is not None and is_sampled(self.config, step + 1):
            held = self.folder.oracle(step + 1).with_name(f"version-{step - 1}")
            self.call("observe", stage="EXPORT", what="hold", version=step - 1, folder=str(held))
            self._held[step - 1] = held / f"weights-{step - 1}"
        return found

    def _take(self, update: OptimizerUpdate, trace: Path | None, oracle: str | None, *, last: bool) -> dict[str, float]:
        """Have the ranks take one optimizer step."""
        report: dict[str, float] = self.call(
            "train", step=update.step, number=update.number, batch=str(update.file), first=update.first, last=last,
            note=None if trace is None else {"trace": str(trace), "oracle": oracle},
        )[0]  # fmt: skip
        return report

    def _send_first(self, version: int, trace: Path | None) -> None:
        """Send an engine the weights that the run goes on from, once; the trace is of the step that they sample."""
        if self.sends_first:
            self.sends_first = False
            self.sync(version, trace)
            if self.revival is not None and trace is not None:
                self.revival.recorded()

    def sync(self, version: int, trace: Path | None) -> None:
        """Send the weights to the engine; raise a ContractError if it refused them and no judge will say why."""
        running: Running = "none"
        if self.ahead is not None and self.ahead.runs:
            running = "kept" if self.config.grpo.keep_kv_cache else "recomputed"
        if self.rollouts is not None:
            self.rollouts.sent.append(version)
        note = None if trace is None else {"trace": str(trace)}
        first = trace is not None and trace == self.folder.trace(version + 1)
        asked = {"version": version, "note": note, "first": first}
        refused, self._sync_facts, lost = self.call("sync", **asked, running=running)[0]
        while (problem := gone(lost)) is not None:
            if self.revival is None or (self.ahead is not None and self.ahead.runs):
                raise problem
            self.revival.revive(problem)
            refused, self._sync_facts, lost = self.call("sync", **asked, again=True)[0]
        if refused and trace is None:
            raise ContractError(f"the engine refused the weights of version {version}: {refused}")

    def look(self, version: int, trace: Path) -> None:
        """Record what the engines hold, beside what the ranks would send as a version.

        Raises:
            EngineGone: one died meanwhile, and nothing was recorded.
        """
        found = self.call("observe", stage="ENGINE", what="look", version=version, trace=str(trace))
        if (problem := gone(found[0])) is not None:
            raise problem

    def _record_restarts(self, probe: Recorder | None, trace: Path | None, step: int) -> bool:
        """Record what engines hold that were started again and sampled a step; True if there were any."""
        if self.revival is None or self.ahead is not None:  # one that samples ahead is not asked meanwhile
            return False
        return self.revival.record(probe, trace, step - 1)

    def _score(self, file: Path, which: str) -> list[np.ndarray]:
        """Log-probabilities of a batch by the live weights or by the reference's."""
        found = file.with_name(f"{file.stem}.{which}.safetensors")
        self.call("score", batch=str(file), which=which, to=str(found))
        lengths = [len(rollout) for rollout in load_rollouts(file)[0]]
        values = load_file(found)["logprobs"]
        found.unlink()  # the columns of the batch keep what the loss reads
        return ragged.split(values, lengths)

    def _begin_trace(self, step: int) -> Path:
        happened = Facts(step=step, updates=(self._updates + 1,))
        self._manifest = step_manifest(self.config, self.model, happened)
        return create(self.folder.trace(step), self._manifest)

    @contextlib.contextmanager
    def _controller_probe(self, trace: Path | None, step: int) -> Iterator[Recorder | None]:
        if trace is None:
            yield None
            return
        with contextlib.closing(Recorder(trace, "controller", 0)) as probe:
            yield probe
            probe.emit(KnobsAsked(name="config", version=step, values=asked(self.config)))
            probe.emit(OptimizerSettings(name="Adam", version=step, **optimizer_settings(self.config)))
            probe.emit(LossTerms(name="loss", version=step, **loss_terms(self.config)))

    def _evaluate(self, step: int) -> dict[str, float]:
        """Evaluate the weights of a step on the held-out problems, if there are any."""
        if self.rollouts is not None:
            return self.rollouts.evaluate(step, judged=self.verdicts.judge is not None)
        if self.held_out is None:
            return {}
        file = self.folder.path / "batches" / HELD_OUT
        if not file.exists():
            self.held_out.save(file)
        answers, self._evaluated = self.call("evaluate", batch=str(file))[0], True
        return {"accuracy": sum(answers) / len(answers), "held_out_version": float(step)}
