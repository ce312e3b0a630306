"""The trial that a fault has to pass: clean holds, faulted is caught in the right stage, healed equals clean."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config import EngineOptions, RoundtripConfig
from verifier.core import store
from verifier.core.comparison import Comparison
from verifier.core.finding import Verdict
from verifier.core.outputs import work_folder
from verifier.core.record import TensorRecord
from verifier.core.trace import Trace
from verifier.errors import VerifierError
from verifier.faults.fault import NO_ENGINE, TRAINING, Fault, Side
from verifier.faults.injection import INJECTED, end
from verifier.faults.training_trial import TrainingOutcome, run_training, training_overrides
from verifier.report.report import Report, report_of
from verifier.runs.resources import Resources
from verifier.runs.runner import Phase, Progress, Runner
from verifier.stages.engine.records import CheckpointView, SyncedTensor
from verifier.stages.export.records import ExportedTensor
from verifier.stages.train.records import UpdatedShard

TIMEOUT_S = 900.0
COLLECTIVE_DEADLINE_S = 60.0
COPIED: tuple[type[TensorRecord], ...] = (ExportedTensor, CheckpointView, SyncedTensor, UpdatedShard)
"""Evidence that must be bitwise the same in the clean and in the healed run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """Result of a trial."""

    fault: Fault
    fired: int
    clean: Verdict
    caught: tuple[str, ...]
    """Codes of the checks that the faulted run violates."""
    first_bad: Comparison | None
    """Earliest mismatch of the faulted run in the data flow."""
    healed: Verdict
    healed_differs: str
    """The first thing that the healed run holds otherwise than the clean one; empty if it holds the same."""
    crashed: str
    """Error that ended the faulted run early, if one did."""
    duration_s: float
    trace: Path
    """Trace of the faulted run, or folder of a training run; gone with the trials unless they are kept."""

    @property
    def failures(self) -> list[str]:
        """Why the trial is not passed; empty if it is."""
        missing = [code for code in self.fault.caught_by if code not in self.caught]
        first, own = self.first_bad.stage if self.first_bad else self.fault.stage, self.fault.stage
        reasons = {
            f"the clean run is {self.clean.name.lower()}": self.clean is not Verdict.HOLDS,
            "the fault never fired": not self.fired,
            f"{', '.join(missing)} did not catch it": missing,
            f"the first bad stage is {first.label}, injected in {own.label}": first is not own,
            f"the healed run is {self.healed.name.lower()}": self.healed is not Verdict.HOLDS,
            f"healed differs from clean: {self.healed_differs}": self.healed is Verdict.HOLDS and self.healed_differs,
        }
        return [reason for reason, holds in reasons.items() if holds]


class Trials:
    """Trials of any number of faults on the same resources; those of one config share its clean run.

    Each step is a line of text for `progress`. The traces of faulted runs go to the folder `keep`, or are thrown
    away with those of the other runs. `resources` are warm ones that others use too and their owner ends; without,
    trials have their own.
    """

    def __init__(self, progress: Progress, keep: Path | None = None, resources: Resources | None = None) -> None:
        self._progress, self._keep, self._shared = progress, keep, resources
        self._stack = contextlib.ExitStack()
        self._clean: dict[tuple[str, RoundtripConfig], tuple[Report, Trace]] = {}
        self._trained: dict[tuple[str, ...], TrainingOutcome] = {}
        self._folders = itertools.count(1)

    def __enter__(self) -> Trials:
        resources = self._shared or self._stack.enter_context(
            Resources(warm=True, collective_deadline_s=COLLECTIVE_DEADLINE_S)
        )
        self._runner = Runner(resources, self._progress)
        aside = self._stack.enter_context(work_folder("faults"))
        self._folder = self._keep or aside
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def trial(self, fault: Fault) -> TrialResult:
        """Run one fault: clean (once per config), then faulted and healed in the same processes."""
        began = time.monotonic()
        if fault.engine == TRAINING:
            return self._training_trial(fault, began)
        config = _config_of(fault)
        key = (fault.engine, config)
        if key not in self._clean:
            self._progress(f"clean run of {fault.model} on {fault.mesh.label()}, engine {fault.engine}")
            trace = self._run(config, fault, ["clean"])["clean"]
            self._clean[key] = _judged(trace)
            shutil.rmtree(trace.parent, ignore_errors=True)
        clean, clean_trace = self._clean[key]
        self._progress(f"{fault.id}: faulted and healed")
        crashed = ""
        try:
            traces = self._run(config, fault, ["faulted", "healed"])
        except _Crashed as crash:
            self._heal_engine(config, fault)
            crashed, traces = crash.args
            traces |= self._run(config, fault, ["healed"])
        report, _ = _judged(traces["faulted"])
        healed, healed_trace = _judged(traces["healed"])
        difference = _difference(healed_trace, clean_trace)
        for phase in traces.keys() - {"faulted"}:
            shutil.rmtree(traces[phase].parent, ignore_errors=True)
        bad = [item for outcome in report.outcomes if outcome.finding for item in outcome.finding.bad]
        return TrialResult(
            fault=fault,
            fired=sum(int(mark.read_text() or 1) for mark in traces["faulted"].parent.glob("fired-*")),
            clean=clean.verdict,
            caught=tuple(item.code for item in report.outcomes if item.verdict is Verdict.VIOLATED),
            first_bad=min(bad, key=lambda item: item.place, default=None),
            healed=healed.verdict,
            healed_differs=difference,
            crashed=crashed,
            duration_s=time.monotonic() - began,
            trace=traces["faulted"],
        )

    def _training_trial(self, fault: Fault, began: float) -> TrialResult:
        resources = self._runner.resources
        key = (*training_overrides(fault), str(fault.saved_on))
        if key not in self._trained:
            self._progress(f"clean training run of {fault.model} on {fault.mesh.label()}")
            self._trained[key] = run_training(fault, self._new_folder(fault, "clean"), resources, self._progress)
        self._progress(f"{fault.id}: faulted and healed")
        folder = self._new_folder(fault, "faulted")
        faulted = run_training(fault, folder, resources, self._progress, inject=True)
        healed = run_training(fault, self._new_folder(fault, "healed"), resources, self._progress)
        clean = self._trained[key]
        return TrialResult(
            fault=fault, fired=faulted.fired, clean=clean.verdict, caught=faulted.caught,
            first_bad=min(faulted.bad, key=lambda item: item.place, default=None), healed=healed.verdict,
            healed_differs="" if healed.weights == clean.weights else "the weights of the last step",
            crashed=faulted.crashed, duration_s=time.monotonic() - began, trace=folder,
        )  # fmt: skip

    def _new_folder(self, fault: Fault, name: str) -> Path:
        folder = self._folder / f"{next(self._folders):04d}-{fault.id}-{name}"
        folder.mkdir(parents=True)
        return folder

    def _run(self, config: RoundtripConfig, fault: Fault, names: list[str]) -> dict[str, Path]:
        """Run phases as one job on one engine.

        Those with an adapter, which stays loaded, have an engine each, and of a fault that is in the derivation too
        each has a layout of its own.
        """
        alone = fault.in_derivation or (config.engine.lora_rank and fault.engine != NO_ENGINE)
        if alone and len(names) > 1:
            return {name: trace for each in names for name, trace in self._run(config, fault, [each]).items()}
        phases = {}
        for name in names:
            folder = self._new_folder(fault, name)
            within = (INJECTED, fault.id, str(folder)) if name == "faulted" else ()
            in_derivation = bool(within) and fault.in_derivation
            phases[name] = Phase(trace=folder / "trace", within=within, in_derivation=in_derivation)
        traces = {name: phase.trace for name, phase in phases.items()}
        try:
            self._runner.roundtrip(config, phases=list(phases.values()), tokens_only=fault.engine == NO_ENGINE)
        except VerifierError as problem:
            if "faulted" not in names:
                raise
            if "healed" not in names or not store.read(traces["healed"]).manifest.complete:
                raise _Crashed(str(problem), traces) from problem
        return traces

    def _heal_engine(self, config: RoundtripConfig, fault: Fault) -> None:
        """End a fault that a rank had asked the engine to begin and died before it could end."""
        if fault.side is not Side.TRAINER and not config.engine.lora_rank:
            client = self._runner.engine(config).process.client(deadline_s=TIMEOUT_S)
            end(client, fault)
            client.close()


class _Crashed(Exception):
    """The ranks of a faulted run did not reach its end: why, and the traces by the name of the run."""


def _config_of(fault: Fault) -> RoundtripConfig:
    alone = fault.engine == NO_ENGINE
    return RoundtripConfig(
        model=fault.model, trace=Path(), mesh=fault.mesh, dtype=fault.dtype,
        engine=EngineOptions(
            kind=fault.engine if not alone else "vllm" if fault.lora_rank else "hf",
            tp=fault.engine_tp, pp=fault.engine_pp, ep=fault.engine_ep, lora_rank=fault.lora_rank,
        ),
        cycles=fault.cycles, update=fault.update, fixes=fault.fixes, timeout_s=TIMEOUT_S,
    )  # fmt: skip


def _judged(path: Path) -> tuple[Report, Trace]:
    trace = store.read(path)
    return report_of(trace, str(path)), trace


def _difference(healed: Trace, clean: Trace) -> str:
    for kind in COPIED:
        ours, theirs = (
            {(i.role, i.rank, i.version, i.name, i.digest) for i in trace.of(kind)} for trace in (healed, clean)
        )
        if ours != theirs:
            _, _, version, name, _ = next(iter(ours ^ theirs))
            return f"`{name}` of version {version} in {kind.stage.label}"
    return ""
