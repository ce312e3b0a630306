"""`verifier train`: a run with a judge in a process of its own, a preflight, and a step that is replayed."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from multiprocessing import active_children
from pathlib import Path
from typing import TYPE_CHECKING

from verifier.cli.results import complain, show
from verifier.config.commands import next_trace
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.core.finding import ExitCode
from verifier.core.outputs import WorkFolder, share_as
from verifier.core.plugins import installed_plugins
from verifier.errors import InternalError, UsageError, VerifierError, ViolationFound
from verifier.launch.child import described, end_with_owner
from verifier.report.progress import LiveView, Progress

if TYPE_CHECKING:
    from multiprocessing.process import BaseProcess

    from verifier.probes.training.run_evidence import RunEvidence
    from verifier.probes.training.verdicts import Judged


REAP_S = 5.0
"""Seconds within which the kernel says how a process ended."""


def judge_step(trace: str) -> Judged:
    """Judge the trace of one step, in the judge's process."""
    import verifier.checks  # noqa: F401  (fills the registry)
    from verifier.core import store
    from verifier.probes.training.verdicts import Judged
    from verifier.report import render_text, report_of

    report = report_of(store.read(Path(trace)), trace)
    return Judged(
        int(report.exit_code), render_text(report), report.suspected,
        computed=frozenset(item.code for item in report.outcomes if item.shares.count),
        mismatched=frozenset(item.code for item in report.outcomes if item.finding is not None),
        not_judged=report.not_judged,
    )  # fmt: skip


_packer = functools.cache(functools.partial(ThreadPoolExecutor, 1, initializer=os.nice, initargs=(19,)))
"""Thread of the judge's process that packs traces, of least priority: Linux counts niceness by thread."""


def pack_step(trace: Path, records: bool) -> None:
    """Have the trace of one step packed, in the judge's process, which goes on meanwhile."""
    from verifier.core import store

    batches = sorted((trace.parent.parent / "batches").glob(f"{trace.name}-*.safetensors"))
    _packer().submit(store.pack, trace, batches, records=records)


class ProcessJudge:
    """A judge in a process of its own, so that steps are judged while others train."""

    def __init__(self, pool: ProcessPoolExecutor) -> None:
        self._pool = pool
        self._process: BaseProcess | None = None

    def submit(self, trace: Path) -> Future[Judged]:
        """Begin to judge a trace.

        Raises:
            InternalError: the process has ended; the verdict says so too, where it ends meanwhile.
        """
        before = None if self._process else {item.pid for item in active_children()}
        try:
            verdict = self._pool.submit(judge_step, str(trace))
        except BrokenProcessPool as problem:
            raise self._died() from problem
        if before is not None:
            self._process = next((item for item in active_children() if item.pid not in before), None)
        found: Future[Judged] = Future()
        verdict.add_done_callback(lambda done: self._hand_on(done, found))
        return found

    def pack(self, trace: Path, *, records: bool = True) -> None:
        """Begin to pack the trace of a step; the next verdict says so where the process has ended."""
        with contextlib.suppress(BrokenProcessPool):
            self._pool.submit(pack_step, trace, records)

    def _hand_on(self, done: Future[Judged], found: Future[Judged]) -> None:
        if done.cancelled():
            found.cancel()
        elif (problem := done.exception()) is None:
            found.set_result(done.result())
        else:
            found.set_exception(self._died() if isinstance(problem, BrokenProcessPool) else problem)

    def _died(self) -> InternalError:
        cause = ""
        if self._process is not None:
            self._process.join(REAP_S)
            cause = "" if self._process.exitcode is None else f": {described(self._process.exitcode)}"
        return InternalError(f"the judge's process has ended{cause}")


@contextlib.contextmanager
def started_judge() -> Iterator[ProcessJudge]:
    """Start the judge's process; at the end it finishes what it judges and what it packs, and begins no other.

    Raises:
        UsageError: a plugin cannot be loaded, which that process would find after the first step.
    """
    if installed_plugins():
        import verifier.checks  # noqa: F401
    folder = WorkFolder("judge")
    share_as(folder.path)
    pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"), initializer=end_with_owner)
    try:
        yield ProcessJudge(pool)
    finally:
        pool.shutdown(cancel_futures=True)
        folder.close()


def train(config: TrainConfig, progress: Progress, view: LiveView | None = None) -> int:
    """Run the config, in a view if there is one, print how it ended, and return the exit code."""
    from verifier.launch.failures import StackFailed
    from verifier.trainer.controller import Trainer
    from verifier.trainer.observer import SILENT
    from verifier.trainer.run_folder import first_of, going_on

    if config.first is not None:
        begin = first_of(config)
        if code := train(begin, progress, view):
            return code
        config = going_on(config, begin)
    try:
        with contextlib.ExitStack() as stack:
            evidence = None
            if config.verify.steps:
                from verifier.probes.training.run_evidence import RunEvidence

                evidence = RunEvidence(stack.enter_context(started_judge()), complain)
            if view is not None:
                stack.enter_context(view.run(config.steps))
            summary = Trainer(config, progress, evidence or SILENT, view=view).run()
    except ViolationFound as found:
        show(str(found))
        return found.exit_code
    except StackFailed as problem:
        if not config.verify.steps:
            from verifier.probes.training.step_trace import leave_failure

            leave_failure(config, problem)
        raise
    accuracy = "" if summary.accuracy is None else f", held-out accuracy {summary.accuracy:.3f}"
    judged, code = "; not judged", ExitCode.HOLDS
    if evidence is not None and (kept := evidence.suspicions) is not None:
        told = "none violated" if kept.open or kept.num_dropped else "all hold"
        judged = f"; {evidence.judged:,} steps judged, {told}"
        if kept.num_dropped:
            judged += f"; suspected and not confirmed: {kept.num_dropped:,}"
        for item in kept.open.values():
            sentence = f"step {item.step} is suspected ({item.sentence}), and no later step judged it again"
            complain(f"inconclusive: {sentence}")
            code = ExitCode.INCONCLUSIVE
    loss = "no token in the loss of any step" if summary.loss is None else f"loss {summary.loss:.4f}"
    if summary.finished_before:
        show(
            f"the run `{config.run}` is finished already: {summary.steps:,} steps, "
            f"{'no loss' if summary.loss is None else loss}{accuracy}; "
            "give more --steps to go on, or another --run\n"
        )
        return code
    resumed = f", continued from step {summary.resumed_from:,}" if summary.resumed_from else ""
    show(f"trained {summary.steps:,} steps{resumed}: {loss}{accuracy}{judged}\nrun: {config.run}\n")
    show(_unjudged(evidence))
    return code


def _unjudged(evidence: RunEvidence | None) -> str:
    """Last line of a judged run: what no check judged, and in how many of its steps."""
    if evidence is None or not evidence.judged:
        return ""
    if not evidence.not_judged:
        return "not judged: nothing that this run has\n"
    parts = (
        text if count == evidence.judged else f"{text} ({count:,} of {evidence.judged:,} steps)"
        for text, count in ((said.removeprefix("not judged: "), count) for said, count in evidence.not_judged.items())
    )
    return f"not judged: {'; '.join(parts)}\n"


def preflight(config: TrainConfig, progress: Progress) -> int:
    """Try one step of the longest samples in a folder beside the run's; print what it took and return the exit code."""
    from verifier.runs.preflight import preflight as tried

    folder = next_trace(f"{config.run.name}-preflight", config.run.parent)
    try:
        with started_judge() as judge:
            found = tried(replace(config, run=folder), progress, judge)
    except ViolationFound as problem:
        show(f"{problem}preflight did not hold; its folder is kept: {folder}\n")
        return problem.exit_code
    except UsageError:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    except VerifierError:
        if folder.exists():
            progress(f"the folder of the preflight is kept: {folder}")
        raise
    shutil.rmtree(folder)
    seconds = ", ".join(f"{name} {value:.3g}" for name, value in found.seconds.items())
    memory = ", ".join(f"rank {rank} {size / 2**30:.3g}" for rank, size in enumerate(found.peak_memory))
    show(
        f"longest samples: {found.samples:,} of at most {found.longest:,} tokens, {found.tokens:,} in all\n"
        f"seconds: {seconds}\npeak memory, GiB: {memory}\nother than the run: {'; '.join(found.notes)}\n"
        "preflight holds: one step judged, and its checkpoint loaded in new ranks as it was saved\n"
    )
    return ExitCode.HOLDS


def require_replay(owners: Mapping[str, str], run: Path | None, step: int | None, others: Mapping[str, bool]) -> None:
    """Refuse options that contradict each other.

    Raises:
        UsageError: names the two.
    """
    asked = [*(["--replay"] if run is not None else []), *(name for name, is_asked in others.items() if is_asked)]
    if run is not None and owners.get("run") == "--run":
        asked.append("--run")
    if len(asked) > 1:
        raise UsageError(f"{asked[0]} and {asked[1]} do not go together: leave one of the two out")
    if run is None and step is not None:
        raise UsageError(f"--step is {step} and --replay is not given: name the run to replay")
    if run is not None and step is None:
        raise UsageError(f"--replay is `{run}` and --step is not given: name the step to replay")


def replay_step(config: TrainConfig, run: Path, step: int, progress: Progress) -> int:
    """Replay a step, print what was found, and return the exit code."""
    from verifier.trainer import replay

    if config.first is not None and (before := run / "first").is_dir():
        begin, _ = load(TrainConfig, file=config.first, overrides=[f"run={before}"])
        replay.require_same_knobs(begin, before)
    found = replay.replay_step(config, run, step, progress)
    begun = f"from the checkpoint of step {found.begun_at}" if found.begun_at else "from the initial weights"
    if found.difference is None:
        show(f"gradients of step {step}: {found.num_tensors:,} tensors, bitwise as recorded ({begun})\n")
        return ExitCode.HOLDS
    at, on_the_way = found.difference, ""
    if at.step != step:
        on_the_way = f", on the way to step {step}"
    more = f", and {at.count - 1:,} more tensors of update {at.number}" if at.count > 1 else f" of update {at.number}"
    losses, norms = (" -> ".join(f"{value:.9g}" for value in pair) for pair in (at.losses, at.grad_norms))
    show(
        f"gradients of step {at.step}{on_the_way}: not as recorded ({begun}): first `{at.name}` on rank {at.rank}"
        f"{more}; loss {losses}, gradient norm {norms} (recorded -> replayed; of gradients a run keeps digests alone)\n"
    )
    return ExitCode.VIOLATED
