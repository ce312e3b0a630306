"""Observer of the controller of a judged run: a trace for each step, its oracle, and the verdict that it waits for."""

from __future__ import annotations

import contextlib
import shutil
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from verifier.config.training import TrainConfig
from verifier.core.manifest import Facts, Manifest
from verifier.core.record import Probe
from verifier.core.store import Recorder, complete, create, forget
from verifier.errors import VerifierError
from verifier.model.families import moe_layers_of
from verifier.oracle.oracle import Oracle, OracleMemoryError
from verifier.probes.training.sampled_step import (
    SampledStep,
    is_sampled,
    objective_of,
    record_scored,
    require_judgeable,
    unsampled_because,
)
from verifier.probes.training.step_trace import failure_traced, step_manifest
from verifier.probes.training.verdicts import Judge, Suspicions, Verdicts, require_held
from verifier.runs.model_under_test import ModelUnderTest
from verifier.runs.resources import Deadline, Resources
from verifier.stages.checkpoint.probe_written import CheckpointEvidence
from verifier.stages.data.probe_rollouts import (
    has_second_reader,
    record_columns,
    record_given,
    record_held_out_read,
    record_policy,
    record_policy_columns,
    record_sampled,
    record_tokens,
    sampling_asked,
    texts_of,
)
from verifier.stages.engine.records import EngineRestart
from verifier.stages.export.probe_tensors import record_files
from verifier.stages.load.records import KnobsAsked
from verifier.stages.logprob.probe_first_rounding import first_rounding, measures_rounding
from verifier.stages.logprob.probe_spot_scores import has_spot, record_spot, why_no_spot
from verifier.stages.logprob.records import SampledNoise
from verifier.stages.loss.records import LossTerms
from verifier.stages.rollout.probe_evaluations import Examine, record_answers, record_held_out
from verifier.stages.train.records import OptimizerSettings, PreviousStep
from verifier.trainer.batches import OptimizerUpdate, ScoredRollouts
from verifier.trainer.engines import gone
from verifier.trainer.evaluation import Answered
from verifier.trainer.observer import Note, Observer, PolicyBatch, RunParts, TextBatch
from verifier.trainer.ranks import optimizer_settings
from verifier.trainer.run_folder import RunFolder
from verifier.trainer.sampled_batch import LogprobLost, SampledBatch, has_fresh
from verifier.trainer.upstream_fields import asked

JUDGED_BEHIND = 2
"""Steps of fine-tuning that may not be judged yet when the next is trained; of GRPO, none."""
RANKS = "verifier.probes.training.rank_evidence_megatron:RankEvidence"
"""Observer of the ranks."""


@dataclass(frozen=True, slots=True)
class Ended:
    """Step that has ended and is not judged yet."""

    step: int
    trace: Path
    manifest: Manifest
    computed: Future[SampledNoise | None] | None
    """Noise that the oracle finds, which computes the step too; None where it does not."""


class RunEvidence(Observer):
    """Traces of a run's steps and of its export, each judged before more is built on it.

    `tell` is called with a sentence on each suspicion; None for the run's progress.

    Attributes:
        suspicions: open ones, which no later step has decided, and the number of dropped ones.
    """

    ranks = RANKS
    judges = True

    def __init__(self, judge: Judge, tell: Callable[[str], None] | None = None) -> None:
        self._judge, self._tell = judge, tell
        self._verdicts: Verdicts | None = None
        self.suspicions: Suspicions | None = None
        self.noise: SampledNoise | None = None
        """Rounding of log-probabilities by the run's dtype, as the last step that measures it found."""
        self._oracle: Oracle | None = None
        self._no_room = ""
        self._probe: Recorder | None = None
        self._scored: ScoredRollouts | None = None
        self._answered: Answered | None = None
        self._evaluated = False
        self._restarts = 0
        """Restarts of engines of which a trace has what they hold now."""
        self._held: dict[int, Path] = {}
        self._sampled: SampledStep | None = None
        self._earlier: Mapping[int, Path] = {}
        self._trace: Path | None = None
        self._ended: Ended | None = None

    @property
    def judged(self) -> int:
        """Steps that were judged, none of which was violated."""
        return 0 if self._verdicts is None else self._verdicts.num_judged

    @property
    def not_judged(self) -> Mapping[str, int]:
        """Sentences on what no check judged -> number of judged steps that each is true of."""
        return {} if self._verdicts is None else self._verdicts.not_judged

    @contextlib.contextmanager
    def during(self, config: TrainConfig, model: ModelUnderTest, folder: RunFolder) -> Iterator[None]:
        """Leave a trace of the failure of the stack that ends the run."""
        with failure_traced(config, model, folder, self._judge), contextlib.ExitStack() as stack:
            stack.callback(self._close)
            self._beside = ThreadPoolExecutor(1, "oracle")
            stack.callback(self._beside.shutdown, wait=False)
            try:
                yield
            except LogprobLost as problem:
                if problem.step and self._probe is not None and self._scored is not None:
                    given = self._scored.rollouts
                    record_policy_columns(self._probe, config, problem.step, self._scored, given)
                raise

    def on_config(self, config: TrainConfig, model: ModelUnderTest) -> None:
        """Refuse what the oracle cannot judge."""
        require_judgeable(config, model)
        self._config = config
        self.checkpoints = CheckpointEvidence()

    def on_finished(self, folder: RunFolder, steps: int) -> None:
        """Take the suspicions that the run has left."""
        self.suspicions = Suspicions(folder.suspicions, steps)

    def on_model(
        self, model: ModelUnderTest, resources: Resources, until: Deadline, progress: Callable[[str], None]
    ) -> None:
        """Start the oracle, or measure what it would, once."""
        if not unsampled_because(self._config, model):
            self._oracle = resources.oracle(model.checkpoint.path, until)
        if measures_rounding(self._config, model):
            progress("measuring what float32 rounds of log-probabilities")
            self.noise = first_rounding(model, until)

    def on_resume(self, step: int) -> None:
        """Know that the ranks have loaded a checkpoint."""
        self.checkpoints.on_resume(step)

    def on_start(self, run: RunParts) -> None:
        """Take the parts of the run, and the suspicions that it goes on with."""
        self.run = run
        self.suspicions = Suspicions(run.folder.suspicions, run.done)
        suspected = self.suspicions.steps
        held = deque(trace for trace in run.folder.traces() if int(trace.name) not in suspected)
        for trace in held:
            if (trace / "evidence").is_dir():  # a stop came before it was packed
                self._judge.pack(trace)
        self._verdicts = Verdicts(
            judge=self._judge, metrics=run.metrics, tell=self._tell or run.progress, suspicions=self.suspicions,
            keep=run.config.verify.keep, held=held,
        )  # fmt: skip
        self._spots = not why_no_spot(run.config, run.model)
        self._layers = moe_layers_of(run.model.checkpoint.config) if run.config.grpo.replay_routes else ()
        self._begins, self._taken = not run.done, run.updates
        self._last = PreviousStep(name="step", version=run.done, updated=run.has_loss, here=False)

    def on_step(self, step: int, *, sends_first: bool) -> None:
        """Begin the step's trace."""
        run = self.run
        self._sent, self._reads_rewards = sends_first, False
        self._sampled, self._scored, self._earlier = None, None, {}
        happened = Facts(step=step, updates=(self._taken + 1,))
        self._trace = create(run.folder.trace(step), step_manifest(run.config, run.model, happened))
        self._probe = Recorder(self._trace, "controller", 0)
        if run.config.samples and step > 1:
            self._probe.emit(self._last)

    def note(self) -> Note | None:
        """Trace of the step, and the folder that the oracle reads."""
        if self._trace is None:
            return None
        told = {} if self._sampled is None else {"oracle": str(self._sampled.folder), "rollouts": self._sampled.places}
        return {"trace": str(self._trace), "oracle": None, **told}

    @contextlib.contextmanager
    def blaming(self, until: int) -> Iterator[None]:
        """Let a step that does not hold, up to one, go before an error within, which it may be the cause of."""
        assert self._verdicts is not None
        try:
            yield
        except VerifierError:
            self._judge_ended()
            self._verdicts.settle(until)
            raise

    def on_rollouts(self, step: int, batch: SampledBatch, sent: Sequence[int]) -> None:
        """Record the prompts and requests of a step."""
        run, probe = self.run, self._open
        assert run.data is not None
        data = run.data
        record_sampled(probe, run.config, data, step, batch)
        asks = sampling_asked(run.config, run.model.checkpoint, data.tokenizer, step, whole_answers=run.whole_answers)
        probe.emit(replace(asks, sent=tuple(sent[-max(run.config.grpo.max_staleness, 1) - 2 :])))
        self._rounds = batch.rounds

    def on_scores(self, step: int, scored: ScoredRollouts, parts: Sequence[Sequence[int]], file: Path) -> None:
        """Score one rollout by itself."""
        self._scored = scored
        if self._spots and has_spot(step):
            record_spot(self._open, self.run.config, step, scored.rollouts, parts, self.run.score, file)

    def on_batch(self, batch: TextBatch | PolicyBatch) -> None:
        """Record what the loss takes, beside a second reading of what it is made from."""
        if isinstance(batch, TextBatch):
            self._record_text(batch)
            return
        run, probe = self.run, self._open
        self._reads_rewards = has_second_reader(batch.reward, batch.rows)
        record_policy(probe, run.config, batch)
        if run.data is not None:
            self._record_texts(probe, batch)
        if self._layers and batch.updates:
            record_given(probe, run.config, batch, self._layers)

    def _record_texts(self, probe: Probe, batch: PolicyBatch) -> None:
        """Record what the tokens of sampled rollouts say."""
        data, rollouts = self.run.data, batch.scored.rollouts
        assert data is not None
        probe.emit(texts_of(batch.step, data.tokenizer, rollouts))

        def example_of(place: int) -> Any:
            at, which, _ = rollouts[place].group.split("/", 2)
            return data.train[self._rounds[int(at.partition(".")[2] or 0)].indices[int(which)]]

        record_tokens(probe, batch.step, data.tokenizer, data.files, rollouts, example_of, whole=False, chat=data.chat)

    def _record_text(self, batch: TextBatch) -> None:
        run, probe, step = self.run, self._open, batch.step
        config, data, examples, rollouts = run.config, run.data, batch.examples, batch.update.rollouts
        assert data is not None
        record_tokens(
            probe, step, data.tokenizer, data.files, rollouts, examples.__getitem__, whole=True, chat=data.chat
        )
        record_columns(probe, config, batch.update)
        if self._spots and has_spot(step):
            record_spot(probe, config, step, rollouts, [range(len(rollouts))], run.score, batch.update.file)

    def on_updates(self, step: int, updates: Sequence[OptimizerUpdate]) -> None:
        """Record what else the step begins with, and declare what its trace has to show."""
        self._judge_ended()
        run, probe = self.run, self._open
        config, first = run.config, step == run.done + 1
        stored = self.checkpoints.record_stored(probe)
        restarted = self._record_restarts(probe, step - 1) if updates else False
        resumed = bool(updates) and self.checkpoints.begins_judged()
        examined = self._examine(probe, step - 1)
        every = config.evaluation.every
        due = first or (every > 0 and step % every == 0)
        read = (run.data.train, run.data.held_out) if run.data is not None and (due or examined) else ((), ())
        evaluated = record_held_out_read(probe, step, config, *read)
        fresh = has_fresh(config, [item for update in updates for item in update.rollouts], step - 1)
        gone_until = run.done + config.grpo.max_staleness  # weights of before a resume sampled these steps
        known = run.ahead is None or not run.done or step > gone_until
        assert self.suspicions is not None
        again = run.ahead is None and bool(self.suspicions.open)
        if updates and self._oracle is not None and known and (is_sampled(config, step) or again):
            folder = run.folder.oracle(step)
            self._sampled = SampledStep(config, run.model, self._oracle, folder, step, updates, self._scored)
            if self._sampled.scored is not None:
                record_scored(probe, config, step, self._sampled.scored)
        self._manifest = step_manifest(config, run.model, Facts(
            step=step, updates=tuple(item.number for item in updates), sampled=self._sampled is not None,
            loaded=self._begins and bool(updates), sent=self._sent, resumed=resumed, restarted=restarted,
            stored=stored, evaluated=evaluated, examined=examined, fresh=fresh,
            rewarded=self._reads_rewards, noise=self._record_noise(probe, step, fresh=fresh),
            why_unsampled=self._no_room,
        ))  # fmt: skip
        probe.emit(KnobsAsked(name="config", version=step, values=asked(config)))
        probe.emit(OptimizerSettings(name="Adam", version=step, **optimizer_settings(config)))
        probe.emit(LossTerms(name="loss", version=step, **objective_of(config)))
        self._close()
        self._updates, self._begins = updates, self._begins and not updates
        self._taken += len(updates)
        if run.ahead is not None:
            self._earlier = self._hold_weights(step)

    def before_training(self, step: int) -> None:
        """Wait for the verdicts on the steps before, but for the last ones of fine-tuning, which copies no rollout."""
        assert self._verdicts is not None
        self._verdicts.settle(step - 1 - (JUDGED_BEHIND if not self.run.config.samples else 0))

    def on_sync(self, version: int) -> None:
        """Know that a trace has what the engines hold."""
        if self.run.engines is not None:
            self._restarts = self.run.engines.engines.restarted

    def on_step_end(self, step: int, reports: Sequence[Mapping[str, float]]) -> None:
        """Have the step judged; where the oracle computes it too, once the next one has been sampled meanwhile."""
        run, trace, computed = self.run, self._trace, None
        assert trace is not None
        if self._sampled is not None:
            run.progress(f"step {step}: transformers computes it too")
            rates = [report["learning_rate"] for report in reports]
            given = (trace, self._updates, rates, self._earlier, self.noise)
            computed = self._beside.submit(self._sampled.judge, *given)
        self._ended = Ended(step, trace, self._manifest, computed)
        if computed is None or run.ahead is not None or run.config.engine.sleep_level:  # who takes turns needs the room
            self._judge_ended()
        self._last = PreviousStep(name="step", version=step, updated=bool(self._updates), here=True)
        self._trace, self._sampled = None, None

    def _judge_ended(self) -> None:
        """Have the step that has ended judged, if it is not; wait for the oracle, and the verdict on what it found."""
        ended, self._ended = self._ended, None
        if ended is None:
            return
        assert self._verdicts is not None
        manifest = ended.manifest
        if ended.computed is not None:
            try:
                self.noise = ended.computed.result() or self.noise
            except OracleMemoryError as problem:
                manifest = self._without_oracle(ended, str(problem))
        complete(ended.trace, manifest)
        self._verdicts.ask(ended.step, ended.trace)
        if self.run.ahead is not None or ended.computed is not None:
            self._verdicts.settle(ended.step)
        config = self.run.config
        needed = ended.step - config.grpo.max_staleness if ended.step < config.steps else ended.step
        for version in [each for each in self._held if each < needed]:
            shutil.rmtree(self._held.pop(version).parent)

    def _without_oracle(self, ended: Ended, problem: str) -> Manifest:
        """Go on without an oracle, which has no room beside trainer and engine; returns the manifest of its last step.

        The verdicts of that step and of those after it say what nothing judges, and why.
        """
        self.run.progress(f"step {ended.step}: transformers computes no further step: {problem}")
        folder = self.run.folder.oracle(ended.step)
        if self._oracle is not None:
            with contextlib.suppress(VerifierError):
                self._oracle.ask("streaming_hf:release", [folder])
        self._oracle, self._no_room = None, problem.partition(";")[0]
        forget(ended.trace, "oracle")
        shutil.rmtree(folder, ignore_errors=True)
        facts = replace(ended.manifest.facts, sampled=False, noise=False, why_unsampled=self._no_room)
        return replace(ended.manifest, facts=facts)

    def on_evaluation(self, version: int, answered: Answered | None) -> None:
        """Keep the answers for the trace that comes next."""
        self._evaluated, self._answered = True, answered

    def before_checkpoint(self, step: int) -> None:
        """Wait for the verdicts on every step up to the checkpoint."""
        assert self._verdicts is not None
        self._judge_ended()
        self._verdicts.settle(step)

    def on_checkpoint(self, step: int, found: Sequence[Any]) -> None:
        """Keep what was read back of a checkpoint."""
        self.checkpoints.on_checkpoint(step, found)

    def before_export(self, step: int) -> Note | None:
        """Begin the trace of the export."""
        run = self.run
        self._export = ExportTrace(run.config, run.model, run.folder, step)
        self._export.record(self._last, self.checkpoints, self._examine, self.noise)
        return {"trace": str(self._export.path)}

    def on_export(self, step: int, source: Path, exported: Path) -> None:
        """Have the export judged."""
        self._export.judge(self._judge, source, exported)

    @property
    def _open(self) -> Recorder:
        assert self._probe is not None
        return self._probe

    def _close(self) -> None:
        if self._probe is not None:
            self._probe.close()
            self._probe = None

    def _record_restarts(self, probe: Probe, version: int) -> bool:
        """Record what engines hold that were started again and sampled a step; True if there were any."""
        revival, trace = self.run.engines, self._trace
        if revival is None or self.run.ahead is not None:  # one that samples ahead is not asked meanwhile
            return False
        count = revival.engines.restarted - self._restarts
        if not count:
            return False

        def look() -> None:
            found = self.run.call("observe", stage="ENGINE", what="look", version=version, trace=str(trace))
            if (problem := gone(found[0])) is not None:
                raise problem

        revival.repeated(look, version)
        probe.emit(EngineRestart(name="the engines", version=version, restarts=count))
        self.on_sync(version)
        return True

    def _examine(self, probe: Probe | None, version: int) -> bool:
        """Record the last evaluation, if no trace has it, beside scores by the weights; tell whether there was one."""
        run = self.run
        if probe is None or run.config.engine.quantization:
            return False
        evaluated, self._evaluated = self._evaluated, False
        answered, self._answered = self._answered, None
        if answered is not None:
            record_answers(probe, run, answered, version)
            return True
        examined = evaluated and run.data is not None and run.data.task == "sft"
        if examined and run.data is not None:
            record_held_out(probe, version, run.data, run.folder.held_out)
        return examined

    def _record_noise(self, probe: Probe, step: int, *, fresh: bool) -> bool:
        """Record the last measured noise beside a step that measures none; True if there is one.

        A sampled step measures it on fresh tokens; without any it repeats the last one by itself.
        """
        sampled = self._sampled is not None
        if not sampled and self.noise is not None:
            probe.emit(replace(self.noise, version=step))
        measures = sampled and (fresh or not self.run.config.samples or self.run.model.dtype == "float32")
        return measures or self.noise is not None

    def _hold_weights(self, step: int) -> Mapping[int, Path]:
        """Have the ranks write the weights before a step; return those that the oracle may need in it, by version."""
        config, found = self.run.config, dict(self._held)
        later = range(step + 1, min(step + config.grpo.max_staleness, config.steps) + 1)
        if self._oracle is not None and any(is_sampled(config, each) for each in later):
            held = self.run.folder.oracle(step).with_name(f"version-{step - 1}")
            self.run.call("observe", stage="EXPORT", what="hold", version=step - 1, folder=str(held))
            self._held[step - 1] = held / f"weights-{step - 1}"
        return found


class ExportTrace:
    """A trace for the ranks to write their evidence to; one of an earlier export is removed.

    Attributes:
        path: of the trace.
    """

    def __init__(self, config: TrainConfig, model: ModelUnderTest, folder: RunFolder, step: int) -> None:
        self._manifest = replace(
            step_manifest(config, model, Facts(part="export", step=step)), engine="", engine_ranks=0, synced_versions=()
        )
        # Scores put an engine that sleeps to rest; the last step's noise of another dtype is in its own trace.
        self._step, self._examines = step, model.dtype == "float32" and not config.engine.sleep_level
        shutil.rmtree(folder.export_trace, ignore_errors=True)
        self.path = create(folder.export_trace, self._manifest)

    def record(
        self, last: PreviousStep, continuation: CheckpointEvidence, examine: Examine, noise: SampledNoise | None
    ) -> None:
        """Record the last step, the checkpoints of the run, and answers of its evaluation."""
        with contextlib.closing(Recorder(self.path, "controller", 0)) as probe:
            stored = continuation.record_stored(probe)
            examined = self._examines and examine(probe, self._step)
            if examined:
                probe.emit(last)
            if examined and noise is not None:
                probe.emit(replace(noise, version=self._step + 1))
            facts = replace(self._manifest.facts, stored=stored, examined=examined, noise=noise is not None)
            self._manifest = replace(self._manifest, facts=facts)

    def judge(self, judge: Judge, source: Path, exported: Path) -> None:
        """Have it judged, with the files beside the weights of the source and of what was exported.

        Raises:
            ViolationFound: a check does not hold.
        """
        with contextlib.closing(Recorder(self.path, "source", 0)) as probe:
            record_files(probe, source, exported, self._step)
        complete(self.path, self._manifest)
        require_held(judge, self.path, "the export")
