"""The engines of a run, here or behind Ray: connected to controller and ranks, and started again when one dies."""

from __future__ import annotations

import abc
import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from verifier.engine.api import EngineConfig
from verifier.engine.client import EngineClient, EngineGone
from verifier.engine.process import EngineProcess
from verifier.engine.replicas import clients_of
from verifier.errors import InternalError
from verifier.launch.watchdog import Vigil
from verifier.runs.resources import Deadline, Resources

if TYPE_CHECKING:
    from verifier.runs.cluster_ray import Cluster, ClusterEngine

RESTARTS = 3
"""Restarts of engines that a run may have."""

DEATH_S = 5.0
"""Seconds from the end of a connection to that of a process, which ends its workers first."""


class Engines(abc.ABC):
    """Engines whose death ends no run: all are started again, and get the weights that they held.

    One request may take `deadline_s`. With no `restarts` left, a death ends what the run waits for, at once.

    Attributes:
        restarted: restarts that the run has had.
    """

    def __init__(
        self, asked: Sequence[EngineConfig], until: Deadline, deadline_s: float, progress: Callable[[str], None], *,
        restarts: int,
    ) -> None:  # fmt: skip
        self._asked, self._until, self._deadline_s = asked, until, deadline_s
        self._progress, self._restarts, self.restarted = progress, restarts, 0
        self._open, self._vigil = contextlib.ExitStack(), Vigil()
        self._running: Sequence[EngineProcess] | Sequence[ClusterEngine] = ()
        self._start()

    @property
    def sockets(self) -> list[str]:
        """Places at which rank 0 reaches the processes that run now; see `EngineClient`."""
        return [str(process.socket_path) for process in self._running]

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes that run now, on their nodes."""
        return [process.pid for process in self._running]

    def client(self) -> EngineClient:
        """A new connection of the controller, in the place of the one before."""
        self._open.close()
        client = clients_of(self.sockets, self._deadline_s, self._vigil)
        return self._open.enter_context(contextlib.closing(client))

    def restart(self, why: EngineGone) -> None:
        """Start them again, and wait until they have loaded the checkpoint of version 0.

        Raises:
            EngineGone: none has died, or none may be started again.
            InternalError: they have died too often.
        """
        if not self._restarts or not self._ended():
            raise why  # another engine's death, as the oracle's
        if self.restarted == self._restarts:
            raise InternalError(f"an engine died after {self.restarted} restarts, and a run has no more: {why}")
        self.restarted += 1
        reason = str(why).partition("\n")[0].removesuffix("; its last words:")
        self._progress(f"{reason}: starting it again (restart {self.restarted} of {self._restarts})")
        self._open.close()
        self._stop()  # one that lives may wait for what the dead one was to send
        self._start()

    def close(self) -> None:
        """Leave them to who ends them."""
        self._open.close()

    @abc.abstractmethod
    def _start(self) -> None:
        """Start all of them, and wait until they have loaded their model."""

    @abc.abstractmethod
    def _stop(self) -> None:
        """End all of them, dead or alive."""

    def _ended(self) -> bool:
        """Wait a little for the end of one of them; True if it has ended."""
        until = time.monotonic() + DEATH_S
        while not any(process.ended(0.02) for process in self._running):
            if time.monotonic() > until:
                return False
        return True


class HostEngines(Engines):
    """Engines on this host, which `resources` start and end; see `Engines`."""

    def __init__(self, asked: Sequence[EngineConfig], resources: Resources, *given: Any, restarts: int) -> None:
        self._resources = resources
        super().__init__(asked, *given, restarts=restarts)

    def close(self) -> None:
        """Leave them to their resources, and have a death end their waits again."""
        super().close()
        for process in self._processes:
            process.watch(True)

    def _start(self) -> None:
        self._processes = self._running = list[EngineProcess]()
        for config in self._asked:
            name = "the engine" if len(self._asked) == 1 else f"engine {config.replica}"
            self._processes.append(self._resources.engine(config, self._until, name).process)
            self._processes[-1].watch(not self._restarts)
        self._vigil = self._processes[0].vigil

    def _stop(self) -> None:
        for config in self._asked:
            self._resources.stop_engine(config)


class ClusterEngines(Engines):
    """Engines of a cluster, each behind an actor of Ray on its node; see `Engines`."""

    def __init__(self, asked: Sequence[EngineConfig], cluster: Cluster, *given: Any, restarts: int) -> None:
        self._cluster = cluster
        super().__init__(asked, *given, restarts=restarts)

    def _start(self) -> None:
        left = self._until.left("the engine was started")
        self._engines = self._running = self._cluster.engines(self._asked, left, watched=not self._restarts)

    def _stop(self) -> None:
        for engine in self._engines:
            engine.end()


class Revival:
    """Repeats what the death of an engine has interrupted.

    `connect` has controller and ranks talk to the processes that run now; `sync` sends the weights of a version to
    them, without evidence.
    """

    def __init__(self, engines: Engines, connect: Callable[[], None], sync: Callable[[int], None]) -> None:
        self.engines, self._connect, self._sync = engines, connect, sync

    def repeated(self, function: Callable[[], Any], version: int) -> Any:
        """Call a function that asks the engine, again for each death, from the weights of a version."""
        problem: EngineGone | None = None
        while True:
            try:
                if problem is not None:
                    self.revive(problem)
                    self._sync(version)
                return function()
            except EngineGone as gone:
                problem = gone

    def revive(self, problem: EngineGone) -> None:
        """Start the engines again and connect them; their weights are those of version 0."""
        while True:
            self.engines.restart(problem)
            try:
                self._connect()
                return
            except EngineGone as gone:
                problem = gone


def gone(text: Any) -> EngineGone | None:
    """The death of an engine that a rank has reported; None for no text."""
    return EngineGone(text) if text else None
