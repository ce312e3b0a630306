"""The trial that a fault has to pass: clean holds, faulted is caught in the right stage, healed equals clean."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.config import EngineOptions, RoundtripConfig
from verifier.core import store
from verifier.core.comparison import Comparison
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest, replace
from verifier.core.record import TensorRecord
from verifier.core.records_engine import CheckpointView, SyncedTensor
from verifier.core.records_logprobs import SampledTokens, ShapedTokens
from verifier.core.records_weights import ExportedTensor, JoinedTensor, LoadedShard, StepReport, UpdatedShard
from verifier.core.trace import Trace
from verifier.engine.client import EngineClient
from verifier.engine.engine import EngineConfig
from verifier.engine.process import EngineProcess, engine_fork_server
from verifier.errors import ContractError, VerifierError
from verifier.faults.engine_side import end
from verifier.faults.fault import NO_ENGINE, Fault, Side
from verifier.launch.fork_launcher import ForkLauncher
from verifier.oracle.oracle import Oracle
from verifier.platform.upstream_fixes import selected
from verifier.probes.engine import Held, held_by
from verifier.report.report import Report, report_of
from verifier.runs.roundtrip import MAX_MODEL_LEN, manifest_of, spec_of
from verifier.runs.setup import PRELOADS, Subject, open_subject

CYCLES = 2
DEADLINE_S = 300.0
COPIED: tuple[type[TensorRecord], ...] = (ExportedTensor, CheckpointView, SyncedTensor, UpdatedShard)
"""What must be bitwise the same in the clean and in the healed run."""
TOKEN_SCOPES = ("tokens", "replay", "forced", "logprob", "layout", "replicas", "step", "gradient")
"""What a trial without an engine is judged by: nothing is exported there."""
SEEN_BY_ORACLE = (LoadedShard, UpdatedShard, JoinedTensor)
"""What the oracle reads of a run, besides the sampled tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialResult:
    """What a trial showed."""

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
    """What ended the faulted run early, if something did."""
    duration_s: float

    @property
    def failures(self) -> list[str]:
        """Why the trial is not passed; empty if it is."""
        found = []
        if self.clean is not Verdict.HOLDS:
            found.append(f"the clean run is {self.clean.name.lower()}")
        if not self.fired:
            found.append("the fault never fired")
        missing = [code for code in self.fault.caught_by if code not in self.caught]
        if missing:
            found.append(f"{', '.join(missing)} did not catch it")
        if self.first_bad is not None and self.first_bad.stage is not self.fault.stage:
            found.append(f"the first bad stage is {self.first_bad.stage.label}, injected in {self.fault.stage.label}")
        if self.healed is not Verdict.HOLDS:
            found.append(f"the healed run is {self.healed.name.lower()}")
        elif self.healed_differs:
            found.append(f"healed differs from clean: {self.healed_differs}")
        return found


class Bench:
    """Everything that trials share: the imported ranks, one engine per kind and model, the oracle, the clean runs.

    Args:
        progress: told what runs.
        keep: folder for the traces; None throws them away.
    """

    def __init__(self, progress: Callable[[str], None], keep: Path | None = None) -> None:
        self._progress = progress
        self._keep = keep
        self._stack = contextlib.ExitStack()
        self._engines: dict[EngineConfig, tuple[EngineProcess, Held]] = {}
        self._clean: dict[tuple[Any, ...], tuple[Report, Trace, Path]] = {}
        self._oracle: Oracle | None = None

    def __enter__(self) -> Bench:
        self._launcher = self._stack.enter_context(ForkLauncher(preload=PRELOADS["cpu"]))
        self._fork_server = self._stack.enter_context(engine_fork_server())
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="verifier-faults-")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def trial(self, fault: Fault) -> TrialResult:
        """Run one fault: clean (once per subject), then faulted and healed in the same processes."""
        began = time.monotonic()
        setting = _Setting(self, fault)
        if (key := setting.key) not in self._clean:
            self._progress(f"clean run of {fault.model} on {fault.mesh.label()}, engine {fault.engine}")
            _, problem = setting.run(["clean"])
            if problem:
                raise problem
            self._clean[key] = (*setting.judge("clean"), setting.trace("clean"))
        self._progress(f"{fault.id}: faulted and healed")
        fired, problem = setting.run(["faulted", "healed"])
        report, _ = setting.judge("faulted")
        if problem is not None:
            setting.run(["healed"])
        healed, healed_trace = setting.judge("healed")
        clean, clean_trace, _ = self._clean[key]
        bad = [item for outcome in report.outcomes if outcome.finding for item in outcome.finding.bad]
        return TrialResult(
            fault=fault,
            fired=fired,
            clean=clean.verdict,
            caught=tuple(item.code for item in report.outcomes if item.verdict is Verdict.VIOLATED),
            first_bad=min(bad, key=lambda item: item.place, default=None),
            healed=healed.verdict,
            healed_differs=_difference(healed_trace, clean_trace),
            crashed="" if problem is None else str(problem),
            duration_s=time.monotonic() - began,
        )

    def engine(self, config: EngineConfig) -> tuple[EngineProcess, Held]:
        """A running engine and what it held right after its cold start; a new one for every run with an adapter."""
        if config.lora_rank and config in self._engines:
            self._engines.pop(config)[0].stop()
        if config not in self._engines:
            self._progress(f"starting the {config.kind} engine with {Path(config.checkpoint).name}")
            process = self._stack.enter_context(EngineProcess(config, fork_server=self._fork_server))
            client = process.client(deadline_s=DEADLINE_S)
            self._engines[config] = (process, held_by(client))
            client.close()
        return self._engines[config]

    def oracle(self, checkpoint: Path) -> Oracle:
        """The oracle process, started once."""
        if self._oracle is None:
            self._oracle = self._stack.enter_context(Oracle(checkpoint, DEADLINE_S))
        return self._oracle

    def clean(self, key: tuple[Any, ...]) -> tuple[Trace, Path] | None:
        """The clean run of a subject and where its trace lies; None before it has run."""
        return self._clean[key][1:] if key in self._clean else None

    def folder(self, fault: Fault, phase: str) -> Path:
        """Where a phase's trace goes."""
        name = f"{len(list(self._folder.iterdir())):04d}-{fault.id}-{phase}"
        return (self._keep or self._folder) / name

    def submit(self, world_size: int, args: Mapping[str, Any], fault: Fault) -> list[Any]:
        """Run the phases on forked ranks."""
        return self._launcher.run(
            "verifier.faults.trial_megatron:phases", world_size=world_size,
            run_dir=Path(tempfile.mkdtemp(dir=self._folder)), args=args, deadline_s=DEADLINE_S,
            collective_deadline_s=60.0, mesh=fault.mesh,
        )  # fmt: skip


class _Setting:
    """One fault's model, mesh and engine, and the traces of its phases."""

    def __init__(self, bench: Bench, fault: Fault) -> None:
        self._bench, self._fault = bench, fault
        self._alone = fault.engine == NO_ENGINE
        self.config = RoundtripConfig(
            model=fault.model, trace=Path(), mesh=fault.mesh, dtype=fault.dtype,
            cycles=CYCLES, update=fault.update,
            engine=EngineOptions(
                kind=fault.engine if not self._alone else "vllm" if fault.lora_rank else "hf",
                tp=fault.engine_tp, lora_rank=fault.lora_rank,
            ),
            fixes=fault.fixes,
        )  # fmt: skip
        self.subject: Subject = open_subject(fault.model, fault.dtype, fault.mesh)
        self._socket: str | None = None
        self.cold = Held(tensors=(), settings=())
        bench.oracle(self.subject.checkpoint.path)  # it imports while the engine starts
        if not self._alone and not fault.lora_rank:
            self._open_engine()
        self._traces: dict[str, tuple[Path, Path]] = {}

    @property
    def key(self) -> tuple[Any, ...]:
        """What faults have to share so that they share a clean run."""
        fault = self._fault
        engine = (fault.engine, fault.engine_tp, fault.lora_rank, fault.fixes)
        return (fault.model, fault.mesh, fault.dtype, fault.update, *engine)

    def _open_engine(self) -> None:
        config = EngineConfig(
            kind=self._fault.engine, checkpoint=str(self.subject.checkpoint.path), dtype=self._fault.dtype,
            tp=self._fault.engine_tp, lora_rank=self._fault.lora_rank, max_model_len=MAX_MODEL_LEN,
            fixes=tuple(sorted(selected(self._fault.fixes))),
        )  # fmt: skip
        process, self.cold = self._bench.engine(config)
        self._socket = str(process.socket_path)

    def run(self, phases: list[str]) -> tuple[int, VerifierError | None]:
        """Run phases; how often the fault fired on all ranks, and what ended a job early.

        They are one job on one engine, but for those with an adapter: that one stays loaded, so each gets its own.
        """
        if self._alone or not self._fault.lora_rank:
            return self._run(phases)
        results = []
        for phase in phases:
            self._open_engine()
            results.append(self._run([phase]))
        return sum(fired for fired, _ in results), next((problem for _, problem in results if problem), None)

    def _run(self, phases: list[str]) -> tuple[int, VerifierError | None]:
        rows = []
        manifest = self._manifest()
        for phase in phases:
            folder = self._bench.folder(self._fault, phase)
            trace, work = store.create(folder / "trace", manifest), folder / "work"
            work.mkdir()
            self._traces[phase] = (trace, work)
            rows.append([phase, str(trace), str(work)])
        spec = self._spec(Path(rows[0][1]), Path(rows[0][2]))
        args = {"spec": spec.to_json(), "fault": self._fault.id, "phases": rows}
        try:
            results = self._bench.submit(self.config.mesh.world_size, args, self._fault)
        except VerifierError as problem:
            self._heal_engine()
            return sum(1 for phase in phases for _ in self._traces[phase][1].glob("fired-*")), problem
        return sum(result["fired"] for result in results), None

    def _heal_engine(self) -> None:
        """A rank that died could not end the fault that it had asked the engine to begin."""
        if self._fault.side is not Side.TRAINER and self._socket is not None:
            client = EngineClient(self._socket, deadline_s=DEADLINE_S)
            end(client, self._fault)
            client.close()

    def _spec(self, trace: Path, work: Path) -> Any:
        import dataclasses

        spec = spec_of(self.config, self.subject, trace, work, self._socket, len(self.cold.tensors))
        return dataclasses.replace(spec, restore_first=True, deadline_s=60.0)

    def _manifest(self) -> Manifest:
        manifest = replace(manifest_of(self.config, self.subject), synced_versions=tuple(range(CYCLES + 1)))
        if self._alone:
            manifest = replace(manifest, scopes=tuple(each for each in manifest.scopes if each in TOKEN_SCOPES))
        return manifest

    def trace(self, phase: str) -> Path:
        """Where a phase's trace lies."""
        return self._traces[phase][0]

    def _record_oracle(self, trace: Path, work: Path) -> None:
        """Ask the oracle, unless it has seen the same weights and tokens in the clean run: then what it said there."""
        clean = self._bench.clean(self.key)
        if clean is None or self._fault.lora_rank or not _same_to_oracle(store.read(trace), clean[0]):
            self._bench.oracle(self.subject.checkpoint.path).record(trace, self._spec(trace, work), self.subject)
            return
        for folder in ("evidence", "arrays"):
            for file in (clean[1] / folder).glob("oracle-*"):
                shutil.copy(file, trace / folder)

    def judge(self, phase: str) -> tuple[Report, Trace]:
        """Complete a phase's trace with the oracle's and the cold engine's evidence, and judge it.

        Of weights that no oracle can load, for one is missing, there is no such evidence; the rest is judged.
        """
        trace, work = self._traces[phase]
        self.cold.record_cold(trace, version=0)
        try:
            self._record_oracle(trace, work)
        except ContractError as problem:
            store.fail(trace, self._manifest(), str(problem))
        else:
            store.complete(trace, self._manifest())
        found = store.read(trace)
        return report_of(found, str(trace)), found


def _same_to_oracle(one: Trace, other: Trace) -> bool:
    """True when all that the oracle reads of two runs is the same: live weights, bit for bit, norms, sampled tokens."""
    sampled = [
        [item.tokens for kind in (SampledTokens, ShapedTokens) for item in trace.of(kind)] for trace in (one, other)
    ]
    steps = [
        [(item.rank, item.loss, item.num_tokens, item.grad_norm) for item in trace.of(StepReport)]
        for trace in (one, other)
    ]
    return sampled[0] == sampled[1] and steps[0] == steps[1] and not _difference(one, other, SEEN_BY_ORACLE)


def _difference(healed: Trace, clean: Trace, kinds: tuple[type[TensorRecord], ...] = COPIED) -> str:
    for kind in kinds:
        ours, theirs = (
            {(i.role, i.rank, i.version, i.name): i.digest for i in trace.of(kind)} for trace in (healed, clean)
        )
        for key in theirs.keys() | ours.keys():
            if ours.get(key) != theirs.get(key):
                return f"`{key[3]}` of version {key[2]} in {kind.stage.label}"
    return ""
