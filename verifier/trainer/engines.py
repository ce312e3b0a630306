"""The engines of a run on this host: connected to controller and ranks, and started again when a process dies."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import Any

from verifier.engine.api import EngineConfig
from verifier.engine.client import EngineClient, EngineGone
from verifier.engine.process import EngineProcess
from verifier.engine.replicas import clients_of
from verifier.errors import InternalError
from verifier.runs.resources import Deadline, Resources

RESTARTS = 3
"""Restarts of engines that a run may have."""

DEATH_S = 5.0
"""Seconds from the end of a connection to that of a process, which ends its workers first."""


class RunEngines:
    """Engines whose death ends no run: all are started again, and get the weights that they held.

    Args:
        asked: config of each engine.
        resources: start and end them.
        until: deadline of the run.
        deadline_s: seconds that one request may take.
        progress: called with a line of text.
        restarts: that the run may have; with none a death ends what the run waits for, at once.
    """

    def __init__(
        self, asked: Sequence[EngineConfig], resources: Resources, until: Deadline, deadline_s: float,
        progress: Callable[[str], None], *, restarts: int,
    ) -> None:  # fmt: skip
        self._asked, self._resources, self._until, self._deadline_s = asked, resources, until, deadline_s
        self._progress, self._restarts, self._done = progress, restarts, 0
        self._open = contextlib.ExitStack()
        self._processes = self._started()

    @property
    def sockets(self) -> list[str]:
        """Sockets of the processes that run now."""
        return [str(process.socket_path) for process in self._processes]

    @property
    def pids(self) -> list[int]:
        """Process ids of the processes that run now."""
        return [process.pid for process in self._processes]

    def client(self) -> EngineClient:
        """A new connection of the controller, in the place of the one before."""
        self._open.close()
        for process in self._processes:  # each listens
            process.client(self._deadline_s).close()
        client = clients_of(self.sockets, self._deadline_s, self._processes[0].vigil)
        return self._open.enter_context(contextlib.closing(client))

    def restart(self, why: EngineGone) -> None:
        """Start them again, and wait until they have loaded the checkpoint of version 0.

        Raises:
            EngineGone: none has died, or none may be started again.
            InternalError: they have died too often.
        """
        if not self._restarts or not self._ended():
            raise why  # another engine's death, as the oracle's
        if self._done == self._restarts:
            raise InternalError(f"an engine died after {self._done} restarts, and a run has no more: {why}")
        self._done += 1
        reason = str(why).partition("\n")[0]
        self._progress(f"{reason}: starting it again (restart {self._done} of {self._restarts})")
        self._open.close()
        for config in self._asked:  # one that lives may wait for what the dead one was to send
            self._resources.stop_engine(config)
        self._processes = self._started()

    def close(self) -> None:
        """Leave them to their resources, and have a death end their waits again."""
        self._open.close()
        for process in self._processes:
            process.watch(True)

    def _started(self) -> list[EngineProcess]:
        found = []
        for config in self._asked:
            name = "the engine" if len(self._asked) == 1 else f"engine {config.replica}"
            found.append(self._resources.engine(config, self._until, name).process)
            found[-1].watch(not self._restarts)
        return found

    def _ended(self) -> bool:
        """Wait a little for the end of one of them; True if it has ended."""
        until = time.monotonic() + DEATH_S
        while not any(process.ended(0.02) for process in self._processes):
            if time.monotonic() > until:
                return False
        return True


class Revival:
    """Repeats what the death of an engine has interrupted.

    Args:
        engines: of the run.
        connect: has controller and ranks talk to the processes that run now.
        sync: sends the weights of a version to them, without evidence.
    """

    def __init__(self, engines: RunEngines, connect: Callable[[], None], sync: Callable[[int], None]) -> None:
        self.engines, self._connect, self._sync = engines, connect, sync

    def repeated[T](self, function: Callable[[], T], version: int) -> T:
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
