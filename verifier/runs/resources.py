"""Processes that runs need and that are slow to start: launcher of trainer ranks, engines, oracle."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verifier.config.cluster import RayOptions
from verifier.core.outputs import sweep
from verifier.engine.api import EngineConfig
from verifier.engine.process import EngineProcess, engine_fork_server
from verifier.errors import InternalError
from verifier.launch.fork_launcher import ForkLauncher, Launcher
from verifier.launch.fork_server import ForkServer
from verifier.launch.watchdog import Vigil
from verifier.oracle.oracle import Oracle

if TYPE_CHECKING:
    from verifier.runs.cluster_ray import Cluster
    from verifier.stages.engine.probe_engine_state import EngineState

COLLECTIVE_DEADLINE_S = 600.0
"""torch's own deadline with NCCL. All ranks wait for rank 0 while it asks the engine: of a model of 135 million weights
in fp32 a request took more than 200 s on two cores that ten processes shared."""

_LOGS = 4
"""Engines whose logs are kept in memory after their end."""


class Deadline:
    """The end of a run, so many seconds from now; each step asks it for the time that is left."""

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s, self._at = timeout_s, time.monotonic() + timeout_s

    def left(self, step: str) -> float:
        """Seconds that a step may take; with none left an InternalError names the step."""
        left = self._at - time.monotonic()
        if left <= 0:
            raise InternalError(f"--timeout is {self._timeout_s:g} s, which had passed before {step}")
        return left


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningEngine:
    """An engine that has loaded its model."""

    process: EngineProcess
    loaded: EngineState | None
    """Everything that its ranks held right after the start, if it serves several runs."""


LENT: ContextVar[Callable[[], Resources] | None] = ContextVar("LENT", default=None)
"""Maker of the resources of `run_once` where others have imported the libraries; None: cold ones."""


class Resources:
    """Launcher, engines and oracle, each started when it is first asked for.

    Cold ones serve one run, and each ends as soon as the run needs it no more. Warm ones are kept from run to run, so
    every run has to bring its engine back first: it sends the weights of version 0 into parameters that were
    poisoned, and must then find the engine as it was right after its start.

    To enter sweeps what a killed run left. The death of any of them ends what the run waits for; the error names it.

    If `warm`, everything is kept until the end. `launcher` is one whose owner ends it, with Megatron imported; None
    starts one, whose process calls `preload` before it forks ranks. Oracle and engine by transformers are forked from
    `oracles`, vLLM's engines from `engines`; by None the former get an interpreter of their own, and the latter one
    with the first engine. A rank waits `collective_deadline_s` for others, and rank 0 for the engine.
    """

    def __init__(
        self,
        *,
        warm: bool = False,
        launcher: ForkLauncher | None = None,
        preload: str = "verifier.runs.session_megatron:preload",
        oracles: ForkServer | None = None,
        engines: ForkServer | None = None,
        collective_deadline_s: float = COLLECTIVE_DEADLINE_S,
    ) -> None:
        self.warm, self.collective_deadline_s = warm, collective_deadline_s
        self._stack = contextlib.ExitStack()
        self._launcher: Launcher | None = launcher
        self._preload = preload
        self._vigil = Vigil() if launcher is None else launcher.vigil
        self._fork_server = engines
        self._own_server: ForkServer | None = None
        self._oracles = oracles
        self._engines: dict[EngineConfig, RunningEngine] = {}
        self.started: deque[EngineProcess] = deque(maxlen=_LOGS)
        """The last engines, dead or alive, in the order in which they were started."""
        self._oracle: Oracle | None = None
        self.notes: dict[Path, tuple[str, ...]] = {}
        """Notes on each checkpoint that was looked at."""

    def __enter__(self) -> Resources:
        sweep()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:  # the user waits for the reason
            for process in [engine.process for engine in self._engines.values()]:
                process.hasten()
            if self._oracle is not None:
                self._oracle.process.hasten()
        self._stack.close()

    @contextlib.contextmanager
    def on_nodes(
        self, options: RayOptions, folder: Path, world_size: int, until: Deadline, progress: Callable[[str], None]
    ) -> Iterator[Cluster]:
        """Have the nodes of a Ray cluster start all ranks until exit; see `joined`.

        They import Megatron while the caller goes on. A node that does not see the folder is refused.
        """
        from verifier.runs.join_ray import joined

        progress(f"starting Ray ({options.address})")
        with joined(options, folder, world_size) as cluster:
            progress("importing Megatron")
            cluster.load(self._preload, until.left("importing Megatron"), self._vigil)
            before, self._launcher = self._launcher, cluster
            try:
                yield cluster
            finally:
                self._launcher = before

    def launcher(self, until: Deadline) -> Launcher:
        """The process that ranks are forked from, or those on nodes; it imports Megatron while the caller goes on."""
        if self._launcher is None:
            deadline_s = until.left("importing Megatron")
            launcher = ForkLauncher(preload=self._preload, load_deadline_s=deadline_s, vigil=self._vigil)
            self._launcher = self._stack.enter_context(launcher)
        return self._launcher

    def engine(self, config: EngineConfig, until: Deadline, name: str = "the engine") -> RunningEngine:
        """A running engine; one with an adapter serves one run, since the adapter stays loaded."""
        if config.lora_rank:
            self.stop_engine(config)
        if config not in self._engines:
            process = self._process(config, until, name)
            self.started.append(process)
            with contextlib.ExitStack() as until_ready:
                until_ready.callback(process.stop)
                until_ready.callback(process.hasten)
                with contextlib.closing(process.client(until.left(f"{name} listened"))) as client:
                    client.wait_ready(until.left(f"{name} had started"))
                    loaded = None
                    if self.warm:
                        from verifier.stages.engine.probe_engine_state import held_by

                        loaded = held_by(client)
                self._engines[config] = RunningEngine(process=process, loaded=loaded)
                until_ready.pop_all()
            self._stack.callback(self.stop_engine, config)  # before what it was forked from
        return self._engines[config]

    def engines(self, configs: Sequence[EngineConfig], until: Deadline, *, watched: bool) -> list[EngineProcess]:
        """Running engines; the death of one ends the waits of the others if they are `watched`."""
        found = []
        for config in configs:
            name = "the engine" if len(configs) == 1 else f"engine {config.replica}"
            found.append(self.engine(config, until, name).process)
            found[-1].watch(watched)
        return found

    def _process(self, config: EngineConfig, until: Deadline, name: str) -> EngineProcess:
        """A process that begins to be this engine."""
        if config.kind == "hf":
            return EngineProcess(config, fork_server=self._oracles, name=name, vigil=self._vigil, forks=("hf",))
        if self._fork_server is None:
            server = engine_fork_server(until.left("the engine was started"), self._vigil)
            self._fork_server = self._own_server = self._stack.enter_context(server)
        return EngineProcess(config, fork_server=self._fork_server, name=name, vigil=self._vigil)

    def oracle(self, checkpoint: Path, until: Deadline) -> Oracle:
        """The oracle, which judges any checkpoint; it starts with this one while the caller goes on."""
        if self._oracle is None:
            start = functools.partial(EngineProcess, fork_server=self._oracles, vigil=self._vigil, forks=("hf",))
            oracle = Oracle(checkpoint, until.left("the oracle was started"), start)
            self._oracle = self._stack.enter_context(oracle)
        return self._oracle

    def release(self, engine: RunningEngine | None) -> None:
        """Say that a run needs its ranks and its engine no more: cold ones end."""
        if self.warm:
            return
        if self._launcher is not None:
            self._launcher.close()
        if engine is not None:
            self.stop_engine(engine.process.config)

    def end_engine_starts(self) -> None:
        """Say that a run starts no more engines: what cold ones were forked from ends, unless it was given."""
        if self._own_server is not None and not self.warm:
            self._own_server.close()
            self._fork_server = self._own_server = None

    def stop_engines(self) -> None:
        """End the engines; the launcher and the oracle stay."""
        for config in list(self._engines):
            self.stop_engine(config)

    def stop_engine(self, config: EngineConfig) -> None:
        """End the engine of a config, if there is one, dead or alive."""
        if config in self._engines:
            self._engines.pop(config).process.stop()
