"""One wait for many processes: whatever their owner waits for, the death of any of them ends the wait at once."""

from __future__ import annotations

from collections.abc import Callable, Collection
from multiprocessing import connection
from typing import Any

from verifier.errors import VerifierError
from verifier.launch.child import Child


class Vigil:
    """Processes that have to live for as long as their owner needs them. Threads may wait while none keeps or drops."""

    def __init__(self) -> None:
        self._deaths: dict[Child, Callable[[], VerifierError]] = {}

    def keep(self, child: Child, death: Callable[[], VerifierError]) -> None:
        """Watch a process from now on. Of several dead ones the first kept is named.

        Args:
            child: process; drop it before it is stopped.
            death: makes the error that names it, once it has ended; must not wait by this vigil.
        """
        self._deaths[child] = death

    def drop(self, child: Child) -> None:
        """Watch a process no more."""
        self._deaths.pop(child, None)

    def wait(self, wanted: Collection[Any], timeout_s: float | None) -> list[Any]:
        """Wait for one of these objects, which have a `fileno`, as `multiprocessing.connection.wait` does.

        What is ready comes before a death, so that what a process said last is read.

        Raises:
            VerifierError: nothing is ready, and a process that is watched has ended.
        """
        watched: list[Any] = [*wanted, *self._deaths]
        found: list[Any] = connection.wait(watched, timeout_s)
        if ready := [item for item in found if item not in self._deaths]:
            return ready
        for child, death in self._deaths.items():
            if child in found:
                raise death()
        return []

    def look(self, within_s: float = 0.0) -> None:
        """Raise the error of a process that has ended, or ends within so many seconds."""
        self.wait((), within_s)
