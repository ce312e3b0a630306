"""Workers of a gate: as many side by side as this machine has places, each with GPUs of its own.

A worker that dies or hangs past its cell's deadline makes a failed cell of it, and the next cell gets a new worker.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from multiprocessing import connection
from pathlib import Path
from typing import Any

import msgspec

from verifier.config import next_trace
from verifier.launch.channel import ChannelClosed, DeadlinePassed, spawned
from verifier.launch.child import last_lines
from verifier.report.gate_result import Cell, CellResult
from verifier.report.progress import Progress

GRACE_S = 30.0
"""Seconds that a worker has beyond a cell's deadline, so that what hangs in it can be named first."""
_FIRST_S = 120.0
"""Seconds that its imports may take."""
_STOP_S = 15.0


class CellWorker:
    """One worker; use it on the main thread, with whose end it ends. A log under its name has what it prints.

    `places` are the names of its GPUs, or one empty name on a machine without.
    """

    def __init__(self, places: Sequence[str], folder: Path, name: str) -> None:
        self.places, self._log = tuple(places), next_trace(name, folder / "logs", ".log")
        gpus = [place for place in places if place]
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as file:
            self._process, self._channel = spawned(
                "verifier.campaign.gate.cell_runs:serve", [str(folder)], file, death_signal=signal.SIGKILL,
                environment={"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if gpus else None,
            )  # fmt: skip
        self.cell: Cell | None = None
        self._until, self._began, self._fresh = 0.0, 0.0, True

    def fileno(self) -> int:
        """Descriptor that becomes readable when it has something to say, or has ended."""
        return self._channel.fileno()

    def begin(self, cell: Cell, deadline_s: float) -> None:
        """Give it a cell to run."""
        self.cell, self._began = cell, time.monotonic()
        self._deadline_s = deadline_s
        self._until = self._began + deadline_s + GRACE_S + (_FIRST_S if self._fresh else 0.0)
        self._fresh = False
        with contextlib.suppress(ChannelClosed):  # it has ended, which the next turn sees
            self._channel.send({"cell": msgspec.to_builtins(cell), "deadline_s": deadline_s})

    @property
    def left_s(self) -> float:
        """Seconds until its cell counts as hung."""
        return self._until - time.monotonic()

    def turn(self, progress: Progress) -> CellResult | None:
        """Take what it says; the result of its cell, once it has one or can have none any more."""
        if not connection.wait([self._channel.wire], 0):
            return self._failed(f"it did not end within {self._deadline_s:g} s") if self.left_s <= 0 else None
        try:
            said: dict[str, Any] = self._channel.receive(GRACE_S)
        except DeadlinePassed:
            return self._failed("its process stopped in the middle of a message")
        except ChannelClosed:
            cause = self._process.cause_of_death() if self._process.ended(_STOP_S) else None
            return self._failed(f"its process ended: {cause or 'for a reason that nobody knows'}")
        if "progress" in said:
            progress(f"{self.cell.id if self.cell else ''}: {said['progress']}")
            return None
        self.cell = None
        return msgspec.convert(said["result"], CellResult)

    def close(self) -> None:
        """End it, with all that it started."""
        self._channel.close()
        if self.cell is None:  # it waits for an order, and ends by itself
            self._process.ended(_STOP_S)
        self._process.stop(_STOP_S)

    def _failed(self, cause: str) -> CellResult:
        assert self.cell is not None
        seconds = round(time.monotonic() - self._began, 1)
        self._process.stop()
        reason = f"{cause}{last_lines(self._log)}"
        return CellResult(cell=self.cell, status="failed", reason=reason, seconds=seconds)


class WorkerPool:
    """Workers over the places of this machine; to leave ends all of them."""

    def __init__(self, places: Sequence[str], folder: Path) -> None:
        self._free, self._folder = list(places), folder
        self._idle: list[CellWorker] = []
        self._busy: list[CellWorker] = []

    @property
    def busy(self) -> list[CellWorker]:
        """Workers that run a cell."""
        return self._busy

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in [*self.busy, *self._idle]:
            worker.close()

    def begin(self, cell: Cell, deadline_s: float) -> bool:
        """Begin a cell if there is room for it now."""
        worker = next((item for item in self._idle if len(item.places) == cell.num_gpus), None)
        if worker is not None:
            self._idle.remove(worker)
        else:
            if len(self._free) + sum(len(item.places) for item in self._idle) < cell.num_gpus:
                return False
            while len(self._free) < cell.num_gpus:
                self._end(self._idle.pop())
            own, self._free = self._free[: cell.num_gpus], self._free[cell.num_gpus :]
            worker = CellWorker(own, self._folder, "worker")
        worker.begin(cell, deadline_s)
        self.busy.append(worker)
        return True

    def wait(self, progress: Progress) -> list[CellResult]:
        """Wait until a worker says something; results of the cells that have ended."""
        watched: list[Any] = [*self.busy]
        connection.wait(watched, max(0.0, min(worker.left_s for worker in self.busy)))
        results = []
        for worker in list(self.busy):
            result = worker.turn(progress)
            if result is None:
                continue
            self.busy.remove(worker)
            if result.status == "failed":
                self._end(worker)
            else:
                self._idle.append(worker)
            results.append(result)
        return results

    def _end(self, worker: CellWorker) -> None:
        worker.close()
        self._free += worker.places


def places_of(num_gpus: int) -> list[str]:
    """Names of this machine's GPUs as CUDA_VISIBLE_DEVICES takes them; one empty name where there are none."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [name.strip() for name in given.split(",")] if given else [str(number) for number in range(num_gpus)]
    return named[:num_gpus] if num_gpus else [""]
