"""One job inside the forking process: its ranks, what they said, and how it ends."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from verifier.errors import InternalError
from verifier.launch import flight_recorder as flight
from verifier.launch import watchdog
from verifier.launch.rank import RankContext, RankSetup, log_path, run_rank, stack_path

JSON = Any
_GRACE_S = 0.2
"""After the first failure: long enough for its cause to be seen, if what failed first was a peer's lost connection."""
_REAP_S = 10.0
_STACK_S = 0.5
_TAIL_BYTES = 8192
_MAX_STACKS = 8
_PEER_LOST = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe")


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What the parent asked for."""

    job: int
    function: str
    world_size: int
    args: Mapping[str, JSON]
    run_dir: str
    deadline_s: float
    collective_deadline_s: float
    num_gpus: int


@dataclass(slots=True)
class _Rank:
    pid: int
    pid_fd: int
    report_fd: int
    heard: bytearray = field(default_factory=bytearray)
    reaped: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class _Failure:
    rank: int
    at_s: float
    peer_lost: bool
    report: dict[str, JSON]


class RunningJob:
    """Forked ranks and their state. `start` returns in the forking process only."""

    def __init__(self, order: Order, send: Callable[[dict[str, JSON]], None]) -> None:
        self.order = order
        self.run_dir = Path(order.run_dir)
        self.ranks: list[_Rank] = []
        self.memory: mmap.mmap = flight.memory_for(order.world_size)
        self._send = send
        self._results: dict[int, JSON] = {}
        self._failures: list[_Failure] = []
        self._deadline_at = time.monotonic() + order.deadline_s

    def start(self, function: Callable[[RankContext], JSON], private_fds: list[int]) -> None:
        """Fork all ranks.

        Args:
            function: what each rank calls.
            private_fds: descriptors of the forking process that the ranks must not keep.
        """
        self.run_dir.mkdir(parents=True, exist_ok=True)
        sys.stdout.flush()
        sys.stderr.flush()
        watcher_pid = os.getpid()
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            listener.listen(flight.MAX_RANKS)
            for rank in range(self.order.world_size):
                report_fd, child_fd = os.pipe()
                pid = os.fork()
                if pid == 0:
                    self._be(rank, function, listener, child_fd, watcher_pid, [report_fd, *private_fds])
                os.close(child_fd)
                os.set_blocking(report_fd, False)
                self.ranks.append(_Rank(pid=pid, pid_fd=os.pidfd_open(pid), report_fd=report_fd))
                with contextlib.suppress(ProcessLookupError):  # it may have died already; its pid_fd will say so
                    os.setpgid(pid, self.ranks[0].pid)

    def _be(
        self,
        rank: int,
        function: Callable[[RankContext], JSON],
        listener: socket.socket,
        report_fd: int,
        watcher_pid: int,
        private_fds: list[int],
    ) -> NoReturn:
        """In the forked process: drop what is the watcher's, and be the rank; never return into the watcher's loop."""
        try:
            port = listener.getsockname()[1]
            store_fd = listener.detach()
            for fd in (*self.fds(), *private_fds, *((store_fd,) if rank > 0 else ())):
                os.close(fd)
            run_rank(
                RankSetup(
                    rank=rank,
                    world_size=self.order.world_size,
                    run_dir=self.run_dir,
                    function=function,
                    args=self.order.args,
                    collective_deadline_s=self.order.collective_deadline_s,
                    num_gpus=self.order.num_gpus,
                    memory=self.memory,
                    store_port=port,
                    store_fd=store_fd if rank == 0 else None,
                    report_fd=report_fd,
                    watcher_pid=watcher_pid,
                )
            )
        finally:
            os._exit(1)

    def fds(self) -> list[int]:
        """Descriptors that the forking process holds for this job."""
        return [fd for rank in range(len(self.ranks)) for fd in self.fds_of(rank)]

    def fds_of(self, rank: int) -> tuple[int, int]:
        """Those of one rank: readable when it has died, and when it has said something."""
        return self.ranks[rank].pid_fd, self.ranks[rank].report_fd

    @property
    def ending(self) -> bool:
        """Whether a rank has failed already."""
        return bool(self._failures)

    def hear(self, rank: int) -> None:
        """Read what a rank has reported so far: progress, its result, or its failure."""
        state = self.ranks[rank]
        while True:
            try:
                data = os.read(state.report_fd, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                break
            state.heard += data
        *lines, rest = bytes(state.heard).split(b"\n")
        state.heard = bytearray(rest)
        for line in lines:
            message = json.loads(line)
            if "progress" in message:
                self._send({"event": "progress", "job": self.order.job, "rank": rank, "text": message["progress"]})
            elif "result" in message:
                self._results[rank] = message["result"]
            else:
                self._fail(rank, message["failure"])

    def bury(self, rank: int) -> None:
        """A rank has ended before the job has: that is a failure, whatever its exit status."""
        self.hear(rank)
        if any(failure.rank == rank for failure in self._failures):
            return
        _, status = os.waitpid(self.ranks[rank].pid, 0)
        self.ranks[rank].reaped = True
        code = os.waitstatus_to_exitcode(status)
        cause = f"exit status {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        if code == -signal.SIGKILL:
            cause += " (the kernel does this when memory runs out)"
        self._fail(rank, {"error": "", "message": cause, "cause": cause, "traceback": ""})

    def _fail(self, rank: int, failure: dict[str, JSON]) -> None:
        text = failure["message"].lower()
        lost = bool(failure["error"]) and any(words in text for words in _PEER_LOST)
        self._failures.append(_Failure(rank=rank, at_s=time.monotonic(), peer_lost=lost, report=failure))

    def verdict(self) -> dict[str, JSON] | None:
        """The job's closing event once it is over, for any reason; None while it runs. Called at every turn."""
        now = time.monotonic()
        if self._failures:
            first = min(self._failures, key=lambda item: (item.peer_lost, item.at_s))
            if now - self._failures[0].at_s < _GRACE_S:
                return None
            self.kill()
            return self._failed("rank", rank=first.rank, log_tail=self._tail(first), **first.report)
        if len(self._results) == len(self.ranks):
            self.kill()
            results = [self._results[rank] for rank in range(len(self.ranks))]
            return {"event": "done", "job": self.order.job, "results": results}
        waits = [flight.waiting_since(self.memory, rank) for rank in range(len(self.ranks))]
        if now > self._deadline_at:
            states = self._states(range(len(self.ranks)), now)
            self.kill()
            return self._failed(
                "deadline", function=self.order.function, deadline_s=self.order.deadline_s, states=states
            )
        if any(since is not None and now - since > self.order.collective_deadline_s for since in waits):
            return self._stalled(now)
        return None

    def _stalled(self, now: float) -> dict[str, JSON] | None:
        slots = [flight.read_slot(self.memory, rank) for rank in range(len(self.ranks))]
        stall = watchdog.find_stall(slots, now, self.order.collective_deadline_s)
        if stall is None:
            return None
        states = self._states(stall.missing, now)
        self.kill()
        return self._failed(
            "collective",
            op=stall.slot.op,
            tensor=stall.slot.tensor,
            group=list(stall.slot.group.ranks),
            arrived=list(stall.arrived),
            waited_s=stall.waited_s,
            states=states,
        )

    def _failed(self, kind: str, **report: JSON) -> dict[str, JSON]:
        return {"event": "failed", "job": self.order.job, "kind": kind, **report}

    def _states(self, ranks: Sequence[int], now: float) -> list[dict[str, JSON]]:
        """What each of these ranks does; for the first few with the Python frame that it is in."""
        asked = [rank for rank in ranks[:_MAX_STACKS] if rank not in self._results]
        for rank in asked:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self.ranks[rank].pid_fd, signal.SIGUSR1)
        give_up_at = time.monotonic() + _STACK_S
        while time.monotonic() < give_up_at and not all(self._stack(rank) for rank in asked):
            time.sleep(0.02)
        states = []
        for rank in ranks:
            what = watchdog.doing(flight.read_slot(self.memory, rank), now)
            if rank in self._results:
                what = "has returned its result"
            frame = innermost_frame(self._stack(rank)) if rank in asked else ""
            states.append({"rank": rank, "doing": what, "frame": frame})
        return states

    def _stack(self, rank: int) -> str:
        path = stack_path(self.run_dir, rank)
        return path.read_text() if path.exists() else ""

    def _tail(self, failure: _Failure) -> str:
        """The last lines of a rank's log; its traceback, if any, is put below them for whoever opens the file."""
        path = log_path(self.run_dir, failure.rank)
        if not path.exists():
            return ""
        with path.open("rb+") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = log.read().decode("utf-8", "replace")
            log.write(failure.report["traceback"].encode())
        return tail

    def kill(self) -> None:
        """End every rank and whatever it started, and wait until the ranks are gone.

        Raises:
            InternalError: a rank is still there 10 s after SIGKILL (it hangs in the kernel).
        """
        if not self.ranks:
            return
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.ranks[0].pid, signal.SIGKILL)
        give_up_at = time.monotonic() + _REAP_S
        for number, rank in enumerate(self.ranks):
            while not rank.reaped:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(rank.pid_fd, signal.SIGKILL)
                rank.reaped = os.waitpid(rank.pid, os.WNOHANG)[0] != 0
                if not rank.reaped:
                    if time.monotonic() > give_up_at:
                        raise InternalError(f"rank {number} (process {rank.pid}) is still there 10 s after SIGKILL")
                    time.sleep(0.002)

    def close(self) -> None:
        """Give the descriptors back; the ranks are gone."""
        for fd in self.fds():
            os.close(fd)
        self.ranks = []
        self.memory.close()


def innermost_frame(stack: str) -> str:
    """The innermost frame of a faulthandler dump that is not torch's own or ours: "file.py:12 in name"."""
    frames = re.findall(r'File "([^"]+)", line (\d+) in (\S+)', stack)
    for file, line, name in frames:
        if "/torch/" not in file and "/verifier/launch/" not in file:
            return f"{'/'.join(Path(file).parts[-2:])}:{line} in {name}"
    return ""
