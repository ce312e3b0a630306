"""The engines of a run, here or behind Ray: connected to controller and ranks, and started again when one dies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from verifier.engine.api import EngineConfig
from verifier.engine.client import EngineClient, EngineGone
from verifier.engine.replicas import clients_of
from verifier.errors import InternalError
from verifier.runs.resources import Deadline, Resources

if TYPE_CHECKING:
    from verifier.runs.cluster_ray import Cluster

RESTARTS = 3
"""Restarts of engines that a run may have."""

DEATH_S = 5.0
"""Seconds from the end of a connection to that of a process, which ends its workers first."""


class Engines:
    """Engines whose death ends no run: all are started again, and get the weights that they held.

    `source` starts and ends them, on this host or on the nodes of a cluster. One request may take `deadline_s`. With no
    `restarts` left, a death ends what the run waits for, at once.

    Attributes:
        restarted: restarts that the run has had.
    """

    def __init__(
        self, asked: Sequence[EngineConfig], source: Resources | Cluster, until: Deadline, deadline_s: float,
        progress: Callable[[str], None], *, restarts: int,
    ) -> None:  # fmt: skip
        self._asked, self._source, self._until, self._deadline_s = asked, source, until, deadline_s
        self._progress, self._restarts, self.restarted = progress, restarts, 0
        self._open = contextlib.ExitStack()
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
        client = clients_of(self.sockets, self._deadline_s, self._running[0].vigil)
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
        self._source.stop_engines()  # one that lives may wait for what the dead one was to send
        self._start()

    def close(self) -> None:
        """Leave them to who ends them, and have a death end their waits again."""
        self._open.close()
        for process in self._running:
            process.watch(True)

    def _start(self) -> None:
        """Start all of them, and wait until they have loaded their model."""
        self._running = self._source.engines(self._asked, self._until, watched=not self._restarts)

    def _ended(self) -> bool:
        """Wait a little for the end of one of them; True if it has ended."""
        until = time.monotonic() + DEATH_S
        while not any(process.ended(0.02) for process in self._running):
            if time.monotonic() > until:
                return False
        return True


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
