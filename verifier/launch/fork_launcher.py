"""A launcher on one host: ranks are forked from a process that has imported what they need. Light: loads no torch.

    with ForkLauncher(preload="verifier.model.provider_megatron:preload") as launcher:
        results = launcher.run("package.module:function", world_size=4, args={"seed": 1}, run_dir=path, deadline_s=300)

`function` gets a `RankContext` and returns something that JSON can carry; `results` has one such value per rank.
"""

from __future__ import annotations

import abc
import math
import os
import time
from bisect import bisect
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifier.errors import InternalError, UsageError, VerifierError
from verifier.launch import flight_recorder as flight
from verifier.launch import watchdog
from verifier.launch.failures import (
    PEER_LOST,
    CollectiveTimeout,
    JobTimeout,
    LaunchError,
    RankFailed,
    RankState,
    known_error,
)
from verifier.launch.fork_server import ForkServer, Lent
from verifier.launch.node_ranks import NodeRanks
from verifier.launch.rank import JobSpec
from verifier.launch.watchdog import Vigil
from verifier.platform import host_bytes

JSON = Any
LEAST_RANK_BYTES = 12 << 20
"""Memory that a rank of the smallest model takes, bytes."""
_TURN_S = 0.25
"""Longest sleep between two looks at the flight recorder."""
_HASTY_TURN_S = 0.02
"""The same after the first failure, and of each of several nodes."""
_GRACE_S = 0.2
"""Seconds from the first failure to the verdict, and to a look at other processes: a lost connection may be seen before
its cause."""
_MAX_STACKS = 8
_LOOK_S = 5.0
"""Seconds between two looks for ranks that a signal has stopped; who is stopped in both is named."""


class ForkJob:
    """A function under way on its ranks. Nothing is watched, and no progress shown, but in `wait` and `done`."""

    def __init__(
        self, nodes: Sequence[NodeRanks], spec: JobSpec, on_progress: Callable[[int, str], None] | None = None
    ) -> None:
        self._nodes, self._spec, self._on_progress = nodes, spec, on_progress
        self._results: dict[int, JSON] = {}
        self._answers: dict[int, JSON] = {}
        self._called = ""
        self._failures: dict[int, Mapping[str, JSON]] = {}
        self._failed_at = math.inf
        self._outcome: list[JSON] | VerifierError | None = None
        self._deadline_at = time.monotonic() + spec.deadline_s
        self._look_at, self._looks = time.monotonic(), Counter[int]()

    @property
    def done(self) -> bool:
        """True if `wait` would return or raise at once."""
        if self._outcome is None:
            self._turn(0.0)
        return self._outcome is not None

    def wait(self) -> list[JSON]:
        """Wait for all ranks to return; each rank's result, in rank order.

        Raises:
            RankFailed: a rank raised (other than below), exited or was killed; all others were killed at once.
            CollectiveTimeout: a collective waited longer than its deadline; names the ranks that did not come.
            JobTimeout: the job passed its deadline.
            UsageError, ContractError, StackFailed: a rank raised it; the RankFailed is its cause.
            InternalError: the fork server, or another process that its vigil watches, is gone or answers no more.
        """
        while self._outcome is None:
            self._turn(_HASTY_TURN_S if self._failures else _TURN_S)
        if isinstance(self._outcome, VerifierError):
            raise self._outcome
        return self._outcome

    def call(self, name: str, **arguments: JSON) -> list[JSON]:
        """Call a method that every rank serves (`RankContext.serve`); each rank's answer, in rank order.

        Raises:
            JobTimeout: the job passed its deadline; names what each rank is doing that has not answered.
            VerifierError: see `wait`.
        """
        self._answers.clear()
        self._called, world_size = name, self._spec.world_size
        self._tell({"name": name, "arguments": arguments})
        while self._outcome is None and len(self._answers) < world_size:
            self._turn(_HASTY_TURN_S if self._failures else _TURN_S)
        if len(self._answers) < world_size:
            self.wait()
            raise InternalError(f"`{self._spec.function}` ended before it answered `{name}`")
        self._called = ""
        return [self._answers[rank] for rank in range(world_size)]

    def finish(self) -> list[JSON]:
        """Ask ranks that serve calls to return, and wait for their results; see `wait`."""
        self._tell(None)
        return self.wait()

    def _tell(self, message: JSON) -> None:
        for node in self._nodes if self._outcome is None else ():
            node.tell(message)

    def kill(self) -> None:
        """End all ranks, and what they have started."""
        if not self.done:
            self._end(LaunchError(f"`{self._spec.function}` was ended on request"))

    def _turn(self, turn_s: float) -> None:
        """Wait for something to happen, at most so many seconds, and deal with it."""
        longest_s = 0.0
        try:
            for node in self._nodes:
                messages, waited_s = node.poll(turn_s if len(self._nodes) == 1 else min(turn_s, _HASTY_TURN_S))
                longest_s = max(longest_s, waited_s)
                for rank, message in messages:
                    self._deal_with(rank, message)
            if self._on_progress is not None and time.monotonic() > self._look_at:
                self._name_stopped(self._on_progress)
            if self._outcome is None and (verdict := self._verdict(longest_s)) is not None:
                self._end(verdict)
        except VerifierError as problem:  # what the ranks were forked from, or another process, is gone
            self._end(problem)

    def _name_stopped(self, say: Callable[[int, str], None]) -> None:
        """Say once which ranks a signal has stopped: others wait for them until a deadline."""
        self._look_at = time.monotonic() + _LOOK_S
        self._looks = Counter({rank: self._looks[rank] + 1 for rank in self._stopped()})
        for rank in (rank for rank, looks in self._looks.items() if looks == 2):
            say(rank, f"trainer rank {rank} ({self._place(rank)}) is stopped by a signal, as SIGSTOP does")

    def _deal_with(self, rank: int, message: JSON) -> None:
        """Deal with what a rank has reported: progress, its result, an answer, or its failure."""
        if "failure" in message:  # unless it has told a reason before
            self._failed_at = min(self._failed_at, time.monotonic())
            self._failures.setdefault(rank, message["failure"])
        elif "result" in message:
            self._results[rank] = message["result"]
        elif "answer" in message:
            self._answers[rank] = message["answer"]
        elif self._on_progress is not None:
            self._on_progress(rank, message["progress"])

    def _verdict(self, longest_s: float) -> list[JSON] | VerifierError | None:
        """Results or error once the job is over, for any reason; None while it runs."""
        now, everyone = time.monotonic(), range(self._spec.world_size)
        if self._failures:
            return self._failed() if now - self._failed_at > _GRACE_S else None
        if len(self._results) == len(everyone):
            return [self._results[rank] for rank in everyone]
        if now > self._deadline_at:
            called = f", {self._called}" if self._called else ""
            states = self._states([rank for rank in everyone if not called or rank not in self._answers], now)
            return JobTimeout(
                function=f"{self._spec.function}{called}", deadline_s=self._spec.deadline_s, states=states
            )
        if longest_s <= self._spec.collective_deadline_s:
            return None
        slots = self._slots()
        if watchdog.find_stall(slots, now, self._spec.collective_deadline_s) is None:
            return None
        stopped = self._stopped()
        stall = watchdog.find_stall(slots, now, self._spec.collective_deadline_s, stopped)
        assert stall is not None, "who is stopped changes which stall is the root, not whether there is one"
        return CollectiveTimeout(stall, self._states(sorted({*stall.missing, *stopped}), now))

    def _failed(self) -> VerifierError:
        """The first failure, but a cause before a connection that was lost by it; a rank's own errors as themselves."""

        def peer_lost(rank: int) -> bool:
            return any(symptom in self._failures[rank]["message"].lower() for symptom in PEER_LOST)

        for node in self._nodes:
            try:
                node.look(_GRACE_S)
            except VerifierError as death:
                return death
        first = min(self._failures, key=peer_lost)
        record = self._failures[first]
        failed = RankFailed(
            rank=first, place=self._place(first), cause=record["cause"], traceback=record["traceback"],
            log_tail=self._node_of(first).tail(first, record["traceback"]),
        )  # fmt: skip
        error = known_error(record, party=f"trainer rank {first}", place=self._place(first))
        if error is None:
            return failed
        error.__cause__ = failed
        return error

    def _slots(self) -> list[flight.Slot | None]:
        """Slots of all ranks, with their times on the clock of this process."""
        found: list[flight.Slot | None] = []
        for node in self._nodes:
            there_s, slots = node.slots()
            ahead_s = time.monotonic() - there_s
            found += [flight.unpacked(raw, self._spec.world_size, ahead_s) for raw in slots]
        return found

    def _states(self, ranks: Sequence[int], now: float) -> list[RankState]:
        """Occupation of each of these ranks; for the first few with the Python frame that it is in."""
        stopped = self._stopped()
        asked = [rank for rank in ranks[:_MAX_STACKS] if rank not in self._results and rank not in stopped]
        stacks: dict[int, str] = {}
        for node in self._nodes:
            if there := [rank for rank in asked if rank in node.ranks]:
                stacks |= node.stacks(there)
        states, slots = [], self._slots()
        for rank in ranks:
            doing = "has returned its result" if rank in self._results else watchdog.doing(slots[rank], now)
            if rank in stopped:
                doing = f"stopped by a signal, as SIGSTOP does; {doing}"
            frame = watchdog.innermost_frame(stacks.get(rank, ""))
            states.append(RankState(rank=rank, place=self._place(rank), doing=doing, frame=frame))
        return states

    def _stopped(self) -> list[int]:
        return [rank for node in self._nodes for rank in node.stopped()]

    def _node_of(self, rank: int) -> NodeRanks:
        return self._nodes[bisect(self._nodes, rank, key=lambda node: node.ranks.start) - 1]

    def _place(self, rank: int) -> str:
        return ", ".join(filter(None, [self._spec.place(rank), self._node_of(rank).node]))

    def _end(self, outcome: list[JSON] | VerifierError | None) -> None:
        self._outcome = outcome
        for node in self._nodes:
            node.end()


class Launcher(abc.ABC):
    """Starts the ranks of jobs: a `ForkLauncher`, or nodes of a cluster, each with one."""

    @abc.abstractmethod
    def submit(self, spec: JobSpec, on_progress: Callable[[int, str], None] | None = None) -> ForkJob:
        """Start a job. Several may be alive at once.

        Raises:
            UsageError: more ranks than can be started, or a library that is not supported.
            InternalError: the fork server is gone or did not load.
        """

    @abc.abstractmethod
    def close(self) -> None:
        """End it and all ranks."""

    def run(
        self, function: str, *, on_progress: Callable[[int, str], None] | None = None, **options: Any
    ) -> list[JSON]:
        """Submit a `JobSpec` of these fields, and wait."""
        return self.submit(JobSpec(function=function, **options), on_progress).wait()


class ForkLauncher(ForkServer, Launcher):
    """Starts the ranks of any number of jobs. Imports begin at `with`, while the caller goes on; the first job waits.

    `preload` is called before the first fork; it must start no thread, and may take `load_deadline_s`. The death of a
    process of `vigil` ends a job. For `lent` see `ForkServer`.
    """

    def __init__(
        self, *, preload: str = "", load_deadline_s: float = 300.0, vigil: Vigil | None = None, lent: Lent | None = None
    ) -> None:
        super().__init__(
            *filter(None, ["verifier.launch.rank:preload", preload]),
            name="the process that forks ranks",
            # Whoever asks for GPUs while importing asks the driver's management library, which does not start CUDA.
            environment={"OMP_NUM_THREADS": "1", **os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            load_deadline_s=load_deadline_s,
            vigil=vigil,
            lent=lent,
        )

    def __enter__(self) -> ForkLauncher:
        self.start()
        return self

    def submit(self, spec: JobSpec, on_progress: Callable[[int, str], None] | None = None) -> ForkJob:
        """See `Launcher.submit`."""
        require_ranks(spec.world_size)
        return ForkJob([NodeRanks(self, spec)], spec, on_progress)


def require_ranks(world_size: int, nodes: int = 1) -> None:
    """Refuse a number of ranks that memory cannot hold, on one node or in blocks on several as large as this one.

    Raises:
        UsageError: fewer than one, or more than memory holds.
    """
    memory = host_bytes()
    most = memory // LEAST_RANK_BYTES * nodes
    if not 1 <= world_size <= most:
        where = "this machine" if nodes == 1 else f"each of {nodes} nodes"
        raise UsageError(
            f"{world_size:,} ranks asked for: {where} has {memory / 2**30:.1f} GiB of memory, which holds 1 to "
            f"{most // nodes:,} ranks of {LEAST_RANK_BYTES >> 20} MiB"
        )
