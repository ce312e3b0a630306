"""A launcher on one host: ranks are forked from a process that has imported what they need. Light: loads no torch.

    with ForkLauncher(preload="verifier.model.provider_megatron:preload") as launcher:
        results = launcher.run("package.module:function", world_size=4, args={"seed": 1}, run_dir=path, deadline_s=300)

`function` gets a `RankContext` and returns something that JSON can carry; `results` has one such value per rank.
"""

from __future__ import annotations

import math
import os
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

from verifier.errors import InternalError, UsageError, VerifierError
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
from verifier.launch.rank import JobSpec, log_path, stack_path
from verifier.launch.vigil import Vigil

JSON = Any
_TURN_S = 0.25
"""Longest sleep between two looks at the flight recorder."""
_HASTY_TURN_S = 0.02
"""The same after the first failure."""
_GRACE_S = 0.2
"""Seconds from the first failure to the verdict, and to a look at other processes: a lost connection may be seen before
its cause."""
_REPORT_S = 10.0
"""Seconds that a rank may stop in the middle of a report."""
_STACK_S = 0.5
_TAIL_BYTES = 8192
_MAX_STACKS = 8
_PEER_LOST = ("connection closed by peer", "connection reset by peer", "connection refused", "broken pipe")


class ForkJob:
    """A function under way on its ranks. Nothing is watched, and no progress shown, but in `wait` and `done`.

    Args:
        server: forks the ranks; all of them share the memory of what it has imported.
        spec: the job.
        on_progress: called with (rank, text) for each `context.progress`.
    """

    def __init__(
        self, server: ForkServer, spec: JobSpec, on_progress: Callable[[int, str], None] | None = None
    ) -> None:
        self._server, self._spec, self._on_progress = server, spec, on_progress
        self._ranks: list[tuple[Child, Channel]] = []
        self._watched: dict[Channel | Child, int] = {}
        self._results: dict[int, JSON] = {}
        self._answers: dict[int, JSON] = {}
        self._failures: dict[int, Mapping[str, JSON]] = {}
        self._failed_at = math.inf
        self._outcome: list[JSON] | VerifierError | None = None
        self._start()
        self._deadline_at = time.monotonic() + spec.deadline_s

    @property
    def done(self) -> bool:
        """True if `wait` would return or raise at once."""
        if self._outcome is None:
            self._turn(0.0)
        return self._outcome is not None

    def wait(self) -> list[JSON]:
        """Wait for all ranks to return.

        Returns:
            Each rank's result, in rank order.

        Raises:
            RankFailed: a rank raised (other than below), exited or was killed; all others were killed at once.
            CollectiveTimeout: a collective waited longer than its deadline; names the ranks that did not come.
            JobTimeout: the job passed its deadline.
            UsageError, ContractError: a rank raised it; the RankFailed is its cause.
            InternalError: the fork server, or another process that its vigil watches, is gone or answers no more.
        """
        while self._outcome is None:
            self._turn(_HASTY_TURN_S if self._failures else _TURN_S)
        if isinstance(self._outcome, VerifierError):
            raise self._outcome
        return self._outcome

    def call(self, name: str, deadline_s: float, **arguments: JSON) -> list[JSON]:
        """Call a method that every rank serves (`RankContext.serve`), and wait for all answers.

        Args:
            name: the method.
            deadline_s: seconds until the last answer.
            arguments: of the method, the same for all ranks; JSON values.

        Returns:
            Each rank's answer, in rank order.

        Raises:
            JobTimeout: a rank has not answered in time; names what each of those is doing.
            VerifierError: see `wait`.
        """
        self._answers.clear()
        self._tell({"name": name, "arguments": arguments})
        give_up_at, everyone = time.monotonic() + deadline_s, range(self._spec.world_size)
        while self._outcome is None and len(self._answers) < len(everyone):
            self._turn(_HASTY_TURN_S if self._failures else _TURN_S)
            if self._outcome is None and time.monotonic() > give_up_at:
                late = [rank for rank in everyone if rank not in self._answers]
                states = self._states(late, time.monotonic())
                self._end(JobTimeout(function=f"{self._spec.function}, {name}", deadline_s=deadline_s, states=states))
        if len(self._answers) < len(everyone):
            self.wait()
            raise InternalError(f"`{self._spec.function}` ended before it answered `{name}`")
        return [self._answers[rank] for rank in everyone]

    def finish(self) -> list[JSON]:
        """Ask ranks that serve calls to return, and wait for their results; see `wait`."""
        self._tell(None)
        return self.wait()

    def _tell(self, message: JSON) -> None:
        for _, channel in self._ranks if self._outcome is None else ():
            with suppress(ChannelClosed):  # a rank that is gone is found by whoever waits
                channel.send(message)

    def kill(self) -> None:
        """End all ranks, and what they have started."""
        if not self.done:
            self._end(LaunchError(f"`{self._spec.function}` was ended on request"))

    def _start(self) -> None:
        """Fork the ranks, with the file in memory in which they find each other, and that of the flight recorder."""
        spec = self._spec
        spec.run_dir.mkdir(parents=True, exist_ok=True)
        memory_fd = os.memfd_create("flight-recorder")
        store_fd = os.memfd_create("store")  # only processes that are handed it can read or write it
        self._slots = flight.slots_for(spec.world_size, memory_fd)
        try:
            shared = {
                "function": spec.function, "world_size": spec.world_size, "args": dict(spec.args),
                "run_dir": str(spec.run_dir.absolute()), "collective_deadline_s": spec.collective_deadline_s,
                "num_gpus": spec.num_gpus,
            }  # fmt: skip
            for rank in range(spec.world_size):
                log = log_path(spec.run_dir.absolute(), rank)
                log.write_bytes(b"")
                child, reports = self._server.fork(
                    "verifier.launch.rank:run_rank", {**shared, "rank": rank}, log_path=log, fds=[memory_fd, store_fd]
                )
                self._ranks.append((child, reports))
                self._watched |= {reports: rank, child: rank}
        except BaseException:  # nobody else will end the ranks that are there
            self._end(None)
            raise
        finally:
            os.close(memory_fd)
            os.close(store_fd)

    def _turn(self, turn_s: float) -> None:
        """Wait for something to happen, at most so many seconds, and deal with it."""
        try:
            found = self._server.vigil.wait(self._watched, turn_s)
        except VerifierError as death:
            self._end(death)
            return
        for ready in found:
            rank = self._watched.get(ready)
            if rank is not None:
                self._read_reports(rank)
                if isinstance(ready, Child):
                    self._bury(rank)
        if self._outcome is None and (verdict := self._verdict()) is not None:
            self._end(verdict)

    def _read_reports(self, rank: int) -> None:
        """Deal with what a rank has reported so far: progress, its result, or its failure."""
        reports = self._ranks[rank][1]
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
                self._fail(rank, message["failure"])
            elif "result" in message:
                self._results[rank] = message["result"]
            elif "answer" in message:
                self._answers[rank] = message["answer"]
            elif self._on_progress is not None:
                self._on_progress(rank, message["progress"])

    def _bury(self, rank: int) -> None:
        """Note that a rank has ended before the job has: a failure, whatever its exit status."""
        child = self._ranks[rank][0]
        del self._watched[child]
        cause = child.cause_of_death()
        if cause is None:
            self._end(self._server.death())
        else:
            self._fail(rank, {"kinds": [], "message": cause, "cause": cause, "traceback": ""})

    def _fail(self, rank: int, record: Mapping[str, JSON]) -> None:
        """Note the failure of a rank, unless it has told a reason before."""
        self._failed_at = min(self._failed_at, time.monotonic())
        self._failures.setdefault(rank, record)

    def _verdict(self) -> list[JSON] | VerifierError | None:
        """Results or error once the job is over, for any reason; None while it runs."""
        now, everyone = time.monotonic(), range(self._spec.world_size)
        if self._failures:
            return self._failed() if now - self._failed_at > _GRACE_S else None
        if len(self._results) == len(everyone):
            return [self._results[rank] for rank in everyone]
        if now > self._deadline_at:
            states = self._states(everyone, now)
            return JobTimeout(function=self._spec.function, deadline_s=self._spec.deadline_s, states=states)
        slots = [flight.read_slot(slot) for slot in self._slots]
        if watchdog.find_stall(slots, now, self._spec.collective_deadline_s) is None:
            return None
        stopped = [rank for rank in everyone if self._ranks[rank][0].stopped]
        stall = watchdog.find_stall(slots, now, self._spec.collective_deadline_s, stopped)
        assert stall is not None, "who is stopped changes which stall is the root, not whether there is one"
        return CollectiveTimeout(stall, self._states(sorted({*stall.missing, *stopped}), now))

    def _failed(self) -> VerifierError:
        """The first failure, but a cause before a connection that was lost by it; a rank's own errors as themselves."""

        def peer_lost(rank: int) -> bool:
            return any(symptom in self._failures[rank]["message"].lower() for symptom in _PEER_LOST)

        try:
            self._server.vigil.look(_GRACE_S)
        except VerifierError as death:
            return death
        first = min(self._failures, key=peer_lost)
        record = self._failures[first]
        failed = RankFailed(
            rank=first, place=self._spec.place(first), cause=record["cause"], traceback=record["traceback"],
            log_tail=self._tail(first),
        )  # fmt: skip
        error = known_error(record)
        if error is None:
            return failed
        error.__cause__ = failed
        return error

    def _states(self, ranks: Sequence[int], now: float) -> list[RankState]:
        """Occupation of each of these ranks; for the first few with the Python frame that it is in."""
        stopped = {rank for rank in ranks if self._ranks[rank][0].stopped}
        asked = [rank for rank in ranks[:_MAX_STACKS] if rank not in self._results and rank not in stopped]
        for rank in asked:
            self._ranks[rank][0].send_signal(signal.SIGUSR1)
        give_up_at = time.monotonic() + _STACK_S
        while time.monotonic() < give_up_at and not all(self._stack(rank) for rank in asked):
            time.sleep(0.02)
        states = []
        for rank in ranks:
            doing = watchdog.doing(flight.read_slot(self._slots[rank]), now)
            if rank in self._results:
                doing = "has returned its result"
            if rank in stopped:
                doing = f"stopped by a signal, as SIGSTOP does; {doing}"
            frame = watchdog.innermost_frame(self._stack(rank)) if rank in asked else ""
            states.append(RankState(rank=rank, place=self._spec.place(rank), doing=doing, frame=frame))
        return states

    def _stack(self, rank: int) -> str:
        path = stack_path(self._spec.run_dir, rank)
        return path.read_text() if path.exists() else ""

    def _tail(self, rank: int) -> str:
        """The last lines of a rank's log; its traceback, if any, is put below them for whoever opens the file."""
        with suppress(FileNotFoundError), log_path(self._spec.run_dir, rank).open("rb+") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = log.read().decode("utf-8", "replace")
            log.write(self._failures[rank]["traceback"].encode())
            return tail
        return ""

    def _end(self, outcome: list[JSON] | VerifierError | None) -> None:
        """Kill every rank and whatever it started, and wait until they are gone."""
        for child, _ in self._ranks:
            child.send_signal(signal.SIGKILL)
        for child, reports in self._ranks:
            child.stop()
            reports.close()
        self._watched.clear()
        self._outcome = outcome


class ForkLauncher(ForkServer):
    """Starts the ranks of any number of jobs. Imports begin at `with`, while the caller goes on; the first job waits.

    Args:
        preload: "package.module:function", called without arguments before the first fork; it must start no thread.
        load_deadline_s: seconds that imports may take.
        vigil: other processes whose death ends a job.
    """

    def __init__(self, *, preload: str = "", load_deadline_s: float = 300.0, vigil: Vigil | None = None) -> None:
        super().__init__(
            *filter(None, ["verifier.launch.rank:preload", preload]),
            name="the process that forks ranks",
            # Whoever asks for GPUs while importing asks the driver's management library, which does not start CUDA.
            environment={"OMP_NUM_THREADS": "1", **os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            load_deadline_s=load_deadline_s,
            vigil=vigil,
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def submit(self, spec: JobSpec, on_progress: Callable[[int, str], None] | None = None) -> ForkJob:
        """Start a job. Several may be alive at once.

        Args:
            spec: the job.
            on_progress: called with (rank, text) for each `context.progress`, while the job is waited for.

        Raises:
            UsageError: more ranks than can be started, or a library that is not supported.
            InternalError: the fork server is gone or did not load.
        """
        require_ranks(spec.world_size)
        return ForkJob(self, spec, on_progress)

    def run(
        self, function: str, *, on_progress: Callable[[int, str], None] | None = None, **options: Any
    ) -> list[JSON]:
        """Submit a `JobSpec` of these fields, and wait."""
        return self.submit(JobSpec(function=function, **options), on_progress).wait()


def require_ranks(world_size: int) -> None:
    """Refuse a number of ranks that cannot be started.

    Raises:
        UsageError: fewer than one, or more than the flight recorder has room for.
    """
    if not 1 <= world_size <= flight.MAX_RANKS:
        raise UsageError(f"{world_size} ranks asked for: this machine's launcher starts 1 to {flight.MAX_RANKS}")
