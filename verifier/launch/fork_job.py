"""A job on forked ranks, watched by its owner: their reports, their ends, and the flight recorder."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection
from typing import Any

from verifier.errors import InternalError, VerifierError
from verifier.launch import flight_recorder as flight
from verifier.launch import watchdog
from verifier.launch.channel import Channel, ChannelClosed, DeadlinePassed
from verifier.launch.child import Child
from verifier.launch.failures import (
    CollectiveTimeout,
    JobTimeout,
    LaunchError,
    RankFailed,
    RankState,
    known_error,
    to_record,
)
from verifier.launch.fork_server import ForkServer
from verifier.launch.launcher import JobSpec, Rendezvous
from verifier.launch.rank import log_path, stack_path

JSON = Any
_HOST = "127.0.0.1"
"""Interface at which ranks of one host meet."""
_TURN_S = 0.25
"""Longest sleep between two looks at the flight recorder."""
_HASTY_TURN_S = 0.02
"""The same after the first failure."""
_GRACE_S = 0.2
"""Seconds from the first failure to the verdict: a peer's lost connection may be seen before its cause."""
_REPORT_S = 10.0
"""Seconds that a rank may stop in the middle of a report."""
_STACK_S = 0.5
_TAIL_BYTES = 8192
_MAX_STACKS = 8
_PEER_LOST = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe")


@dataclass(frozen=True, slots=True)
class _Rank:
    process: Child
    reports: Channel


@dataclass(frozen=True, slots=True)
class _Failure:
    rank: int
    at_s: float
    record: Mapping[str, JSON]

    @property
    def peer_lost(self) -> bool:
        """True if a lost connection to another rank is all that the rank reported."""
        text = self.record["message"].lower()
        return bool(self.record["kinds"]) and any(symptom in text for symptom in _PEER_LOST)


class ForkJob:
    """See `Job`. Nothing is watched, and no progress shown, but in `wait` and `done`.

    Args:
        server: forks the ranks; all of them share the memory of what it has imported.
        spec: the job.
        on_progress: called with (rank, text).
    """

    def __init__(self, server: ForkServer, spec: JobSpec, on_progress: Callable[[int, str], None] | None) -> None:
        self._server, self._spec, self._on_progress = server, spec, on_progress
        self._ranks: list[_Rank] = []
        self._watched: dict[Channel | Child, int] = {}
        self._results: dict[int, JSON] = {}
        self._failures: list[_Failure] = []
        self._outcome: list[JSON] | VerifierError | None = None
        self._start()
        self._deadline_at = time.monotonic() + spec.deadline_s

    @property
    def done(self) -> bool:
        """See `Job.done`."""
        self._turn(0.0)
        return self._outcome is not None

    def wait(self) -> list[JSON]:
        """See `Job.wait`."""
        while self._outcome is None:
            self._turn(_HASTY_TURN_S if self._failures else _TURN_S)
        if isinstance(self._outcome, VerifierError):
            raise self._outcome
        return self._outcome

    def kill(self) -> None:
        """See `Job.kill`."""
        if not self.done:
            self._end(LaunchError(f"`{self._spec.function}` was ended on request"))

    def _start(self) -> None:
        """Fork the ranks, with the socket at which they will meet and the memory of the flight recorder."""
        spec = self._spec
        spec.run_dir.mkdir(parents=True, exist_ok=True)
        memory_fd = os.memfd_create("flight-recorder")
        self._memory = flight.memory_for(spec.world_size, memory_fd)
        try:
            with socket.create_server((_HOST, 0), backlog=flight.MAX_RANKS) as store:
                shared = {
                    "function": spec.function, "world_size": spec.world_size, "args": dict(spec.args),
                    "run_dir": str(spec.run_dir.absolute()), "collective_deadline_s": spec.collective_deadline_s,
                    "num_gpus": spec.num_gpus, "rendezvous": Rendezvous(_HOST, store.getsockname()[1]),
                }  # fmt: skip
                for rank in range(spec.world_size):
                    log_path(spec.run_dir, rank).write_bytes(b"")
                    process, reports = self._server.fork(
                        "verifier.launch.rank:run_rank",
                        {**shared, "rank": rank},
                        log_path=log_path(spec.run_dir.absolute(), rank),
                        fds=[memory_fd] if rank > 0 else [memory_fd, store.fileno()],
                    )
                    self._ranks.append(_Rank(process, reports))
                    self._watched |= {reports: rank, process: rank}
        except BaseException:  # nobody else will end the ranks that are there
            self._end(None)
            raise
        finally:
            os.close(memory_fd)

    def _turn(self, turn_s: float) -> None:
        """Wait for something to happen, at most so many seconds, and deal with it."""
        if self._outcome is not None:
            return
        for ready in connection.wait(self._watched, turn_s):  # type: ignore[arg-type]  # they have a fileno
            rank = self._watched.get(ready)  # type: ignore[call-overload]
            if rank is not None:
                self._read_reports(rank)
                if isinstance(ready, Child):
                    self._bury(rank)
        if self._outcome is None and (verdict := self._verdict()) is not None:
            self._end(verdict)

    def _read_reports(self, rank: int) -> None:
        """Deal with what a rank has reported so far: progress, its result, or its failure."""
        reports = self._ranks[rank].reports
        while reports in self._watched and reports.wire.poll():
            try:
                message = reports.receive(_REPORT_S)
            except ChannelClosed:
                del self._watched[reports]
                return
            except DeadlinePassed:
                del self._watched[reports]
                message = {"failure": to_record(InternalError(f"stopped {_REPORT_S:g} s in the middle of a report"))}
            if "failure" in message:
                self._failures.append(_Failure(rank, time.monotonic(), message["failure"]))
            elif "result" in message:
                self._results[rank] = message["result"]
            elif self._on_progress is not None:
                self._on_progress(rank, message["progress"])

    def _bury(self, rank: int) -> None:
        """Note that a rank has ended before the job has: a failure, whatever its exit status."""
        process = self._ranks[rank].process
        del self._watched[process]
        cause = process.cause_of_death()
        if cause is None:
            self._end(self._server.death())
        elif not any(failure.rank == rank for failure in self._failures):
            record = {"kinds": [], "message": cause, "cause": cause, "traceback": ""}
            self._failures.append(_Failure(rank, time.monotonic(), record))

    def _verdict(self) -> list[JSON] | VerifierError | None:
        """Results or error once the job is over, for any reason; None while it runs."""
        now = time.monotonic()
        if self._failures:
            return self._failed() if now - self._failures[0].at_s > _GRACE_S else None
        if len(self._results) == self._spec.world_size:
            return [self._results[rank] for rank in range(self._spec.world_size)]
        if now > self._deadline_at:
            states = self._states(range(self._spec.world_size), now)
            return JobTimeout(function=self._spec.function, deadline_s=self._spec.deadline_s, states=states)
        waits = [flight.waiting_since(self._memory, rank) for rank in range(self._spec.world_size)]
        if any(since is not None and now - since > self._spec.collective_deadline_s for since in waits):
            return self._stalled(now)
        return None

    def _failed(self) -> VerifierError:
        """The first failure, but a cause before a connection that was lost by it; a rank's own errors as themselves."""
        first = min(self._failures, key=lambda item: (item.peer_lost, item.at_s))
        failed = RankFailed(
            rank=first.rank,
            place=self._spec.place(first.rank),
            cause=first.record["cause"],
            traceback=first.record["traceback"],
            log_tail=self._tail(first),
        )
        error = known_error(first.record)
        if error is None:
            return failed
        error.__cause__ = failed
        return error

    def _stalled(self, now: float) -> CollectiveTimeout | None:
        slots = [flight.read_slot(self._memory, rank) for rank in range(self._spec.world_size)]
        stall = watchdog.find_stall(slots, now, self._spec.collective_deadline_s)
        if stall is None:
            return None
        return CollectiveTimeout(
            op=stall.slot.op,
            tensor=stall.slot.tensor,
            group=stall.slot.group.ranks,
            arrived=stall.arrived,
            missing=self._states(stall.missing, now),
            waited_s=stall.waited_s,
        )

    def _states(self, ranks: Sequence[int], now: float) -> list[RankState]:
        """Occupation of each of these ranks; for the first few with the Python frame that it is in."""
        asked = [rank for rank in ranks[:_MAX_STACKS] if rank not in self._results]
        for rank in asked:
            self._ranks[rank].process.send_signal(signal.SIGUSR1)
        give_up_at = time.monotonic() + _STACK_S
        while time.monotonic() < give_up_at and not all(self._stack(rank) for rank in asked):
            time.sleep(0.02)
        states = []
        for rank in ranks:
            doing = watchdog.doing(flight.read_slot(self._memory, rank), now)
            if rank in self._results:
                doing = "has returned its result"
            frame = watchdog.innermost_frame(self._stack(rank)) if rank in asked else ""
            states.append(RankState(rank=rank, place=self._spec.place(rank), doing=doing, frame=frame))
        return states

    def _stack(self, rank: int) -> str:
        path = stack_path(self._spec.run_dir, rank)
        return path.read_text() if path.exists() else ""

    def _tail(self, failure: _Failure) -> str:
        """The last lines of a rank's log; its traceback, if any, is put below them for whoever opens the file."""
        with suppress(FileNotFoundError), log_path(self._spec.run_dir, failure.rank).open("rb+") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = log.read().decode("utf-8", "replace")
            log.write(failure.record["traceback"].encode())
            return tail
        return ""

    def _end(self, outcome: list[JSON] | VerifierError | None) -> None:
        """Kill every rank and whatever it started, and wait until they are gone."""
        for rank in self._ranks:
            rank.process.send_signal(signal.SIGKILL)
        for rank in self._ranks:
            rank.process.stop()
            rank.reports.close()
        self._watched.clear()
        self._outcome = outcome
