"""Many runs in one go: what is slow to start is started once and serves them all."""

from __future__ import annotations

import contextlib
import dataclasses
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from verifier.config import GoldenConfig, RoundtripConfig
from verifier.core import store
from verifier.core.manifest import Manifest, replace
from verifier.engine.engine import EngineConfig
from verifier.engine.process import EngineProcess, engine_fork_server
from verifier.launch.fork_launcher import ForkLauncher
from verifier.oracle.oracle import Oracle
from verifier.platform import select
from verifier.platform.upstream_fixes import selected
from verifier.probes.engine import Held, held_by
from verifier.runs.golden import manifest_of as golden_manifest_of
from verifier.runs.roundtrip import engine_config_of, manifest_of, spec_of
from verifier.runs.setup import PRELOADS, Subject, open_subject, run_ranks
from verifier.runs.spec import RunSpec

RUN_DEADLINE_S = 600.0
COLLECTIVE_DEADLINE_S = 180.0
"""All wait for rank 0 while it asks the engine, whose first request may compile kernels: 75 s were seen."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmEngine:
    """A running engine, and what each of its ranks held right after it had loaded."""

    process: EngineProcess
    cold: Held


class Workshop:
    """Imported ranks, one engine per configuration, and the oracle, kept from run to run.

    An engine that has served other runs is brought back first: every run sends it the weights of version 0, into
    parameters that were poisoned, and must then find it as it was right after its cold start.

    Args:
        progress: told what runs.
        launcher: ranks that are imported already; its owner ends it. None starts one.
    """

    def __init__(self, progress: Callable[[str], None], launcher: ForkLauncher | None = None) -> None:
        self._progress = progress
        self._stack = contextlib.ExitStack()
        self._engines: dict[EngineConfig, WarmEngine] = {}
        self._oracle: Oracle | None = None
        self._launcher = launcher

    def __enter__(self) -> Workshop:
        if self._launcher is None:
            self._launcher = self._stack.enter_context(ForkLauncher(preload=PRELOADS[select()]))
        self._fork_server = self._stack.enter_context(engine_fork_server())
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="verifier-workshop-")))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop_engines()
        self._stack.close()

    @property
    def launcher(self) -> ForkLauncher:
        """The process that ranks are forked from."""
        assert self._launcher is not None
        return self._launcher

    def engine(self, config: EngineConfig) -> WarmEngine:
        """A running engine; it is started if none of this configuration runs."""
        if config not in self._engines:
            self._progress(f"starting the {config.kind} engine with {Path(config.checkpoint).name}")
            process = EngineProcess(config, fork_server=self._fork_server)
            with contextlib.ExitStack() as until_ready:
                until_ready.callback(process.stop)
                client = process.client(deadline_s=RUN_DEADLINE_S)
                client.wait_ready(RUN_DEADLINE_S)
                self._engines[config] = WarmEngine(process=process, cold=held_by(client))
                client.close()
                until_ready.pop_all()
        return self._engines[config]

    def stop_engines(self) -> None:
        """End the engines; the ranks and the oracle stay."""
        for engine in self._engines.values():
            engine.process.stop()
        self._engines.clear()

    def oracle(self, checkpoint: Path) -> Oracle:
        """The oracle, which scores any checkpoint."""
        if self._oracle is None:
            self._oracle = self._stack.enter_context(Oracle(checkpoint, RUN_DEADLINE_S))
        return self._oracle

    def golden(self, config: GoldenConfig) -> Path:
        """Load on a mesh and export; the trace is left at its `config.trace`."""
        subject = open_subject(config.model, config.dtype, config.mesh)
        manifest = golden_manifest_of(config, subject)
        store.create(config.trace, manifest)
        spec = RunSpec(
            checkpoint=str(subject.checkpoint.path), mesh=config.mesh, dtype=config.dtype, tier=subject.tier,
            trace=str(config.trace), work=tempfile.mkdtemp(dir=self._folder), deadline_s=COLLECTIVE_DEADLINE_S,
            saves=subject.is_saved, fixes=sorted(selected(config.fixes)),
        )  # fmt: skip
        run_ranks(self.launcher, "golden", spec, RUN_DEADLINE_S, self._progress)
        store.complete(config.trace, manifest)
        return config.trace

    def roundtrip(self, config: RoundtripConfig) -> Path:
        """A whole round trip on the warm engine; the trace is left at `config.trace`."""
        subject = open_subject(config.model, config.dtype, config.mesh)
        self.oracle(subject.checkpoint.path)  # it starts while the engine does
        engine = self.engine(engine_config_of(config, subject))
        manifest = warm_manifest_of(config, subject)
        store.create(config.trace, manifest)
        spec = warm_spec_of(config, subject, config.trace, Path(tempfile.mkdtemp(dir=self._folder)), engine)
        run_ranks(self.launcher, "roundtrip", spec, RUN_DEADLINE_S, self._progress)
        self.complete(config.trace, spec, subject, engine, manifest)
        return config.trace

    def complete(self, trace: Path, spec: RunSpec, subject: Subject, engine: WarmEngine, manifest: Manifest) -> None:
        """Add what the cold engine held and what the oracle says to a trace that the ranks have left."""
        engine.cold.record_cold(trace, version=0)
        self.oracle(subject.checkpoint.path).record(trace, spec, subject)
        store.complete(trace, manifest)


def warm_manifest_of(config: RoundtripConfig, subject: Subject) -> Manifest:
    """As of a round trip, with version 0 synced too."""
    return replace(manifest_of(config, subject), synced_versions=tuple(range(config.cycles + 1)))


def warm_spec_of(config: RoundtripConfig, subject: Subject, trace: Path, work: Path, engine: WarmEngine) -> RunSpec:
    """As of a round trip, with version 0 sent first."""
    spec = spec_of(config, subject, trace, work, str(engine.process.socket_path), len(engine.cold.tensors))
    return dataclasses.replace(spec, restore_first=True, deadline_s=COLLECTIVE_DEADLINE_S)
