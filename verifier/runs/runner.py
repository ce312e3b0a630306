"""One run from its config to its trace: `verifier golden`, `roundtrip`, `bisect` and `noise`, and every trial."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from verifier.config import BisectConfig, EngineOptions, GoldenConfig, NoiseConfig, RoundtripConfig
from verifier.core.manifest import Manifest
from verifier.core.outputs import require_writable, work_folder
from verifier.core.stage import Stage, in_stage
from verifier.core.store import recording, require_room
from verifier.engine.api import EngineConfig
from verifier.errors import InternalError, UsageError, VerifierError
from verifier.launch.child import end_of
from verifier.launch.failures import record_failure
from verifier.mesh import Mesh
from verifier.model.checkpoint import require_computed
from verifier.oracle.noise_floor import Floor, floor_path, write_floor
from verifier.oracle.recording import record_activations, record_oracle
from verifier.oracle.updates import policy_columns
from verifier.runs import golden, noise
from verifier.runs.derived_layout import with_layout
from verifier.runs.model_notes import notes_of
from verifier.runs.model_under_test import ModelUnderTest, open_for_roundtrip, open_model
from verifier.runs.resources import LENT, Deadline, Resources, RunningEngine
from verifier.runs.run_manifest import manifest_of
from verifier.runs.scenario import made_up
from verifier.runs.spec import Placement, RunSpec, engine_config, place, run_spec
from verifier.runs.workload import Workload, expected_rollouts
from verifier.stages.engine.probe_engine_state import held_by

Progress = Callable[[str], None]
ENGINE_FIRST_S = 20.0
"""Ranks wait so much longer for rank 0 than rank 0 for the engine, so that it can say first who does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """One of several sessions of the same ranks on the same engine."""

    trace: Path
    within: tuple[str, ...] = ()
    """Context manager around the session; see `RunSpec.within`."""
    in_derivation: bool = False
    """The context manager is around the derivation of the layout too, which all phases share."""


class Runner:
    """Runs what a config asks for, and leaves its trace; judging is the caller's.

    Every method raises a UsageError for what the user can mend, and leaves no trace then; of any other VerifierError, a
    process that died or hung, the trace says so. `progress` is called with a line of text for each step.
    """

    def __init__(self, resources: Resources, progress: Progress) -> None:
        self.resources, self._progress = resources, progress

    def golden(self, config: GoldenConfig) -> Path:
        """Load through Megatron-Bridge on a mesh and export; returns the trace."""
        until = Deadline(config.timeout_s)
        require_room(config.trace)
        model = open_model(config.model, config.dtype, config.mesh, config.ray.nodes)
        recorded = None
        if config.against is not None:
            recorded = golden.read_manifest(config.against)
            golden.require_same_model(recorded, model, config.against)
        if config.record:
            require_writable(golden.manifest_path(config), make_folder=True)
        with self._placed(config, model, until) as (work, placement):
            if not config.ray.use:
                self._progress("importing Megatron")
            notes = self._notes(model, until)
            model = with_layout(model, config, placement, self.resources, work, until, self._progress)
            manifest = manifest_of(config, model, placement)
            with self._recording([config.trace], manifest, work, notes) as complete:
                spec = self._spec(
                    config, model, placement, recipe="golden", trace=str(config.trace), work=str(work),
                    source_from_manifest=recorded is not None,
                )  # fmt: skip
                self._run_ranks([spec], work, until)
                if recorded is not None:
                    golden.record_manifest(config.trace, recorded)
                complete(config.trace)
        return config.trace

    def roundtrip(
        self, config: RoundtripConfig, *, phases: Sequence[Phase] = (), workload: Workload | None = None,
        tokens_only: bool = False,
    ) -> Path:  # fmt: skip
        """Train, export, sync a live engine, score the same tokens on both sides and by the oracle.

        On warm resources, traces of ranks that failed get the evidence of engine and oracle all the same. Returns the
        last session's trace. The same ranks run `phases` one after another, by default one, which leaves
        `config.trace`. The workload is made up by default. With `tokens_only` nothing is exported, and no engine takes
        part.
        """
        until = Deadline(config.timeout_s)
        phases = phases or (Phase(trace=config.trace),)
        for phase in phases:
            require_room(phase.trace)
        model = open_for_roundtrip(config)
        with self._placed(config, model, until) as (work, placement):
            self._roundtrip(config, model, placement, phases, workload, work, until, tokens_only=tokens_only)
        return phases[-1].trace

    def _roundtrip(
        self, config: RoundtripConfig, model: ModelUnderTest, placement: Placement, phases: Sequence[Phase],
        workload: Workload | None, work: Path, until: Deadline, *, tokens_only: bool,
    ) -> None:  # fmt: skip
        """See `roundtrip`; `work` is a folder that all ranks see."""
        resources, warm = self.resources, self.resources.warm
        if model.layout is None:  # its ranks start twice, and those for the layout would fail first
            self._notes(model, until)
        within = next((phase.within for phase in phases if phase.in_derivation), ())
        notes = list[str]()
        model = with_layout(model, config, placement, resources, work, until, self._progress, within)
        manifest = manifest_of(config, model, placement, restores=warm, tokens_only=tokens_only)
        traces = [phase.trace for phase in phases]
        with self._recording(traces, manifest, work, notes) as complete:
            resources.launcher(until)
            if warm:
                resources.oracle(model.checkpoint.path, until)  # it starts while the engine does
            engine = None
            if not tokens_only:
                self._progress(f"starting the engine ({config.engine.kind}) and importing Megatron")
                with in_stage(Stage.ENGINE):
                    engine = resources.engine(engine_config(config, model, placement), until)
            notes += self._notes(model, until)  # Megatron was imported while the engine started
            specs = [
                self._spec(
                    config, model, placement, workload=workload or made_up(config, model.checkpoint.config),
                    trace=str(phase.trace), within=phase.within, work=tempfile.mkdtemp(dir=work), restore_first=warm,
                    engine_socket=None if engine is None else str(engine.process.socket_path),
                )
                for phase in phases
            ]  # fmt: skip
            failure: VerifierError | None = None
            try:
                self._run_ranks(specs, work, until)
            except VerifierError as problem:
                if not warm:
                    raise
                usage = isinstance(problem, UsageError)  # it would leave no trace
                failure = InternalError(str(problem)) if usage else problem
            resources.release(engine)
            ranks_failed = failure is not None
            for spec in specs:
                try:
                    self._add_witnesses(spec, model, engine, until)
                except VerifierError as problem:  # of weights that the oracle cannot load, for one is missing
                    failure = failure or problem
                else:
                    if not ranks_failed:
                        complete(Path(spec.trace))
            if failure is not None:
                raise failure

    def bisect(self, config: BisectConfig, within: Sequence[str] = ()) -> Path:
        """Record what every module of trainer and oracle puts out, forward and backward; returns the trace."""
        from verifier.stages.pack.probe_tokens import record_of_rollouts

        until = Deadline(config.timeout_s)
        asked = RoundtripConfig(
            model=config.model, trace=config.trace, mesh=config.mesh, dtype=config.dtype, cycles=1, seed=config.seed,
            engine=EngineOptions(kind="hf"), fixes=config.fixes, timeout_s=config.timeout_s,
        )  # fmt: skip
        require_room(config.trace)
        model = open_for_roundtrip(asked)
        if model.tier != "cpu":
            raise UsageError("bisect compares in fp32, which Transformer Engine does not attend in: run it on a CPU")
        placement, resources = place(asked, model.tier), self.resources
        with work_folder("run") as work:
            model = with_layout(model, asked, placement, resources, work, until, self._progress, within)
            manifest = msgspec.structs.replace(
                manifest_of(asked, model, placement, tokens_only=True), command="bisect", config=config.to_dict(),
                synced_versions=(), engine="", engine_ranks=0,
            )  # fmt: skip
            workload = made_up(asked, model.checkpoint.config)
            with self._recording([config.trace], manifest, work) as complete:
                resources.oracle(model.checkpoint.path, until)  # it starts while Megatron is imported
                spec = self._spec(
                    asked, model, placement, recipe="bisect", workload=workload, trace=str(config.trace),
                    work=str(work), within=within,
                )  # fmt: skip
                self._run_ranks([spec], work, until)
                resources.release(None)
                self._progress("the same by transformers in fp32")
                batch = record_of_rollouts("trained", 0, expected_rollouts(workload.batches[0]))
                told = (policy_columns(*batch), workload.objective, model.layout, config.mesh)
                oracle = resources.oracle(model.checkpoint.path, until)
                with in_stage(Stage.LOGPROB):
                    record_activations(oracle, config.trace, work, model.checkpoint, *told)
                complete(config.trace)
        return config.trace

    def noise(self, config: NoiseConfig) -> Floor:
        """Measure what bf16 alone does to a model's log-probabilities; store it under ``golden/noise`` if asked to."""
        until = Deadline(config.timeout_s)
        model = open_model(config.model, noise.DTYPE, Mesh())
        require_computed(model.checkpoint.config)
        if config.record:
            require_writable(floor_path(config.model, noise.DTYPE, model.tier), make_folder=True)
        self._progress("starting transformers")
        oracle = self.resources.oracle(model.checkpoint.path, until)
        score = partial(oracle.score, device="cpu" if model.tier == "cpu" else "cuda")
        why = config.why or "not recorded"
        floor = noise.measure(config.model, model.checkpoint, model.tier, score, self._progress, why=why)
        if config.record:
            self._progress(f"recorded {write_floor(floor)}")
        return floor

    def engine(self, config: RoundtripConfig) -> RunningEngine:
        """The engine that a round trip on these resources will use."""
        model = open_for_roundtrip(config)
        asked = engine_config(config, model, place(config, model.tier))
        return self.resources.engine(asked, Deadline(config.timeout_s))

    def _notes(self, model: ModelUnderTest, until: Deadline) -> tuple[str, ...]:
        path, known = model.checkpoint.path, self.resources.notes
        if path not in known:
            known[path] = notes_of(model, self.resources.launcher(until), until)
        return known[path]

    @contextlib.contextmanager
    def _placed(
        self, config: GoldenConfig | RoundtripConfig, model: ModelUnderTest, until: Deadline
    ) -> Iterator[tuple[Path, Placement]]:
        """A work folder that all ranks see, and where they are; with `ray.use` beside the trace, and on nodes."""
        with work_folder("run", config.trace.parent if config.ray.use else None) as work:
            if not config.ray.use:
                yield work, place(config, model.tier)
                return
            with self.resources.on_nodes(config.ray, work, config.mesh.world_size, until, self._progress) as cluster:
                yield work, place(config, model.tier, cluster.ranks_here)

    def _recording(
        self, traces: Sequence[Path], manifest: Manifest, work: Path, notes: Sequence[str] = ()
    ) -> contextlib.AbstractContextManager[Callable[[Path], None]]:
        """Make the traces; yields what completes one. See `recording`."""

        def logs() -> dict[str, bytes]:
            ranks = sorted((work / "ranks").glob("*.log"))
            engines = {f"engine{number}": process.log() for number, process in enumerate(self.resources.started)}
            return {file.stem: end_of(file) for file in ranks} | engines

        return recording(traces, manifest, logs, record_failure, notes)

    def _spec(self, *given: Any, **session: Any) -> RunSpec:
        return run_spec(*given, deadline_s=self.resources.collective_deadline_s, **session)

    def _run_ranks(self, specs: Sequence[RunSpec], work: Path, until: Deadline) -> None:
        with in_stage(Stage.LOAD):
            self.resources.launcher(until).run(
                "verifier.runs.session_megatron:run",
                world_size=specs[0].config.mesh.world_size,
                run_dir=work / "ranks",
                args={"sessions": [spec.to_json() for spec in specs]},
                deadline_s=until.left("the ranks were started"),
                collective_deadline_s=specs[0].deadline_s + ENGINE_FIRST_S,
                mesh=specs[0].config.mesh,
                num_gpus=specs[0].num_gpus,
                on_progress=lambda rank, text: self._progress(text),
            )

    def _add_witnesses(
        self, spec: RunSpec, model: ModelUnderTest, engine: RunningEngine | None, until: Deadline
    ) -> None:
        """Add what an engine holds that loaded these weights when it started, and what the oracle says."""
        trace = Path(spec.trace)
        oracle = self.resources.oracle(model.checkpoint.path, until)
        if engine is not None and engine.loaded is not None:
            engine.loaded.record_cold(trace, version=0)
        elif engine is not None:
            with in_stage(Stage.ENGINE, spec.cycles):
                self._record_second_engine(spec, engine.process.config, until)
        self.resources.end_engine_starts()  # the oracle needs the memory
        self._progress("scoring by the fp32 oracle")
        with in_stage(Stage.LOGPROB):
            record_oracle(oracle, trace, Path(spec.work), model.checkpoint, model.oracle_device, model.layout)

    def _record_second_engine(self, spec: RunSpec, asked: EngineConfig, until: Deadline) -> None:
        """Start an engine from the exported checkpoint, or with the exported adapter, and record all that it holds."""
        exported = Path(spec.work) / "exported"
        if not spec.lora_rank and not exported.is_dir():
            return
        self._progress(f"starting a second engine from the {'adapter' if spec.lora_rank else 'exported checkpoint'}")
        config = asked if spec.lora_rank else replace(asked, checkpoint=str(exported))
        engine = self.resources.engine(config, until, "the second engine")
        with contextlib.closing(engine.process.client(until.left("the second engine had started"))) as client:
            if spec.lora_rank:
                client.load_adapter(Path(spec.work) / f"adapter-{spec.cycles}")
            held_by(client).record_cold(Path(spec.trace), spec.cycles)
        self.resources.release(engine)


def run_once(run: Callable[[Runner, Any], Any], config: Any, progress: Progress) -> Any:
    """Run a method of `Runner`, such as `Runner.golden`, on cold resources, or on those that are `LENT`."""
    with (LENT.get() or Resources)() as resources:
        return run(Runner(resources, progress), config)
