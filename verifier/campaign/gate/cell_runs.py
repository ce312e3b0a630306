"""The process that runs cells, one after another, and keeps what is slow to start: launcher, engine, oracle.

It gets orders over a channel and answers with lines of progress and, for each order, a `CellResult`. The process that
gave it the orders watches its deadlines.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing import connection
from pathlib import Path

import msgspec
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config import GoldenConfig, RoundtripConfig, TrainConfig, next_trace
from verifier.config.load import load
from verifier.core import store
from verifier.core.finding import Outcome, Verdict
from verifier.errors import InternalError, Stopped, UsageError, VerifierError
from verifier.faults.catalog import CATALOG
from verifier.faults.training_trial import DeferredJudge
from verifier.faults.trial import Trials
from verifier.launch.channel import Channel, ChannelClosed
from verifier.launch.stopping import stop_at
from verifier.probes.training.run_evidence import RunEvidence
from verifier.report import report_of
from verifier.report.gate_result import WORDS, Cell, CellResult, CheckVerdict, GateFinding, Status, check_verdicts
from verifier.report.progress import Progress
from verifier.report.render_text import first_line, render_outcome
from verifier.report.report import Report, explanation
from verifier.runs.resources import Deadline, Resources
from verifier.runs.runner import Runner
from verifier.trainer.controller import Trainer

_HEAVY = ("checkpoints", "hf_model", "oracle", "batches")
"""Folders of a training run that no report needs."""


def serve(channel_fd: str, folder: str) -> None:
    """Be a worker until the other side closes the channel."""
    stop_at(signal.SIGTERM)
    channel = Channel(connection.Connection(int(channel_fd)))

    def progress(text: str) -> None:
        channel.send({"progress": text})

    lost = contextlib.suppress(ChannelClosed, Stopped)
    with lost, Resources(warm=True) as resources, contextlib.ExitStack() as stack:
        worker = CellRuns(resources, Path(folder), progress, stack)
        while True:
            order = channel.receive()
            cell = msgspec.convert(order["cell"], Cell)
            channel.send({"result": msgspec.to_builtins(worker.run(cell, order["deadline_s"]))})


class CellRuns:
    """Runs of cells on the same resources; trials of faults stay open until the stack is closed."""

    def __init__(self, resources: Resources, folder: Path, progress: Progress, stack: contextlib.ExitStack) -> None:
        self._resources, self._folder, self._progress, self._stack = resources, folder, progress, stack
        self._trials: Trials | None = None
        self._engine: tuple[str, ...] = ()

    def run(self, cell: Cell, deadline_s: float) -> CellResult:
        """Run and judge a cell, whatever comes of it."""
        began, at = store.now(), time.monotonic()
        sys.argv[1:] = cell.arguments  # the command line in the traces' manifests
        place = self._folder / "traces" / cell.id.replace(" ", "-").replace(":", "-").replace("/", "-")
        shutil.rmtree(place, ignore_errors=True)
        place.parent.mkdir(parents=True, exist_ok=True)
        engine = (cell.model, cell.dtype, cell.engine, cell.transport)
        if cell.engine and engine != self._engine:
            self._resources.stop_engines()
            self._engine = engine
        try:
            runs = {"train": self._train, "faults": self._faults}
            result = runs.get(cell.kind, self._traced)(cell, place, deadline_s)
        except UsageError as refused:
            result = CellResult(cell=cell, status="not run", reason=str(refused))
        except VerifierError as problem:
            result = self._broken(cell, place, problem)
        return replace(result, began=began, seconds=round(time.monotonic() - at, 1))

    def _traced(self, cell: Cell, trace: Path, deadline_s: float) -> CellResult:
        runner, overrides = Runner(self._resources, self._progress), [f"trace={trace}", f"timeout_s={deadline_s}"]
        if cell.kind == "golden":
            made = runner.golden(load(GoldenConfig, overrides=[*cell.words, *overrides])[0])
        else:
            made = runner.roundtrip(load(RoundtripConfig, overrides=[*cell.words, *overrides])[0])
        return self._judged(cell, trace, [made])

    def _train(self, cell: Cell, run: Path, deadline_s: float) -> CellResult:
        config, _ = load(TrainConfig, overrides=[*cell.words, f"run={run}", f"timeout_s={deadline_s}"])
        launcher = self._resources.launcher(Deadline(deadline_s))
        try:
            evidence, resources = RunEvidence(DeferredJudge()), self._resources
            Trainer(config, self._progress, evidence, launcher=launcher, resources=resources).run()
        finally:
            self._resources.stop_engines()
            self._engine = ()
        traces = _traces_of(run)
        if len(traces) < config.steps:
            raise InternalError(f"{len(traces)} traces of {config.steps} steps were left")
        result = self._judged(cell, run, traces)
        for name in _HEAVY:
            shutil.rmtree(run / name, ignore_errors=True)
        return result

    def _faults(self, cell: Cell, place: Path, deadline_s: float) -> CellResult:
        if self._trials is None:
            keep = next_trace("faults", self._folder / "traces")
            keep.mkdir(parents=True)
            self._trials = self._stack.enter_context(Trials(self._progress, keep, self._resources))
        fault = CATALOG[cell.fault]
        found = self._trials.trial(fault)
        caught = [
            CheckVerdict(code=code, name="", verdict="caught" if code in found.caught else "missed")
            for code in fault.caught_by
        ]
        stage = found.first_bad.stage.label if found.first_bad is not None else "no stage"
        reason = "; ".join(found.failures) or f"caught in {stage} by {', '.join(found.caught)}"
        return CellResult(
            cell=cell, status="violated" if found.failures else "holds", reason=reason, checks=tuple(caught),
            trace=self._within(found.trace),
        )  # fmt: skip

    def _broken(self, cell: Cell, place: Path, problem: VerifierError) -> CellResult:
        """Result of a run that broke: violated where what it had recorded shows it, else failed."""
        traces = _traces_of(place) if cell.kind == "train" else [place]
        traces = [path for path in traces if (path / "manifest.json").exists()]
        result = CellResult(cell=cell, status="failed")
        with contextlib.suppress(UsageError):  # a trace that cannot be read
            result = self._judged(cell, place, traces) if traces else result
        status: Status = "violated" if result.status == "violated" else "failed"
        return replace(result, status=status, reason=str(problem))

    def _judged(self, cell: Cell, place: Path, traces: Sequence[Path]) -> CellResult:
        reports = [report_of(store.read(path), str(path)) for path in traces]
        return replace(result_of(cell, reports, self._within), trace=self._within(place))

    def _within(self, path: Path) -> str:
        return os.path.relpath(path, self._folder)


def _traces_of(run: Path) -> list[Path]:
    steps = sorted(path.parent for path in (run / "steps").glob("*/evidence"))
    return [*steps, *(path for path in (run / "export", run / "failure") if (path / "manifest.json").exists())]


def result_of(cell: Cell, reports: Sequence[Report], within: Callable[[Path], str]) -> CellResult:
    """Result of a cell by the reports on its traces."""
    verdict = max((report.verdict for report in reports), default=Verdict.INCONCLUSIVE)
    found = [
        _finding(report, outcome, within) for report in reports for outcome in report.outcomes
        if outcome.verdict is not Verdict.HOLDS
    ]  # fmt: skip
    found.sort(key=lambda item: (not item.violated, item.place, item.check))
    first = next((item.stage for item in found if item.violated), "")
    unfinished = [report for report in reports if not report.manifest.complete]
    reason = found[0].sentence if found else unfinished[0].manifest.failure if unfinished else ""
    if not found and unfinished and not reason:
        reason = "the run did not finish writing its trace"
    return CellResult(
        cell=cell, status=WORDS[verdict], reason=reason, findings=tuple(found),
        checks=check_verdicts([report.outcomes for report in reports]),
        first_bad_stage=first,
        not_judged=tuple(dict.fromkeys(clause for report in reports for clause in report.not_judged)),
    )  # fmt: skip


def _finding(report: Report, outcome: Outcome, within: Callable[[Path], str]) -> GateFinding:
    bad = outcome.finding
    return GateFinding(
        check=outcome.code, name=outcome.name, sentence=first_line(outcome),
        text=render_outcome(outcome, report.trace, report.manifest), violated=outcome.verdict is Verdict.VIOLATED,
        stage="" if bad is None else bad.first_bad_stage.label,
        place=() if bad is None else tuple(int(part) for part in bad.first.place),
        known_bug=explanation(outcome, report.manifest), trace=within(Path(report.trace)),
    )  # fmt: skip
