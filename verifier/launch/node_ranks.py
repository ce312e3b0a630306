"""Ranks of a job on one node: forked there, read and ended there. Light: loads no torch."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from verifier.errors import InternalError
from verifier.launch import flight_recorder as flight
from verifier.launch import watchdog
from verifier.launch.channel import Channel, ChannelClosed, DeadlinePassed
from verifier.launch.child import Child
from verifier.launch.failures import to_record
from verifier.launch.fork_server import ForkServer
from verifier.launch.rank import LOOPBACK, JobSpec, log_path, stack_path

JSON = Any
_REPORT_S = 10.0
"""Seconds that a rank may stop in the middle of a report."""
_STACK_S = 2.0
_TAIL_BYTES = 8192


class NodeRanks:
    """Some or all ranks of a job.

    `server` forks the ranks, by default all of the job, which share the memory of what it has imported; they listen at
    `address`. `rendezvous` is host and port of the store that rank 0 serves to the ranks of several nodes; None binds
    it at `address`. `on_host` are the ranks of all nodes on this node's host, which take its GPUs in turn, by default
    those of this node.
    """

    def __init__(
        self,
        server: ForkServer,
        spec: JobSpec,
        ranks: range | None = None,
        address: str = LOOPBACK,
        rendezvous: tuple[str, int] | None = None,
        on_host: range | None = None,
    ) -> None:
        self.node, self.ranks = "", range(spec.world_size) if ranks is None else ranks
        self._on_host = self.ranks if on_host is None else on_host
        self._server, self._spec = server, spec
        self._processes: dict[int, tuple[Child, Channel]] = {}
        self._watched: dict[Channel | Child, int] = {}
        spec.run_dir.mkdir(parents=True, exist_ok=True)
        self.rendezvous = rendezvous
        memory_fd = os.memfd_create("flight-recorder")
        self._slots = flight.slots_for(spec.world_size, memory_fd)
        try:
            if len(self.ranks) == spec.world_size:  # only processes that are handed the file can read or write it
                store_fd = os.memfd_create("store")
                try:
                    self._start(address, [memory_fd, store_fd], [memory_fd, store_fd])
                finally:
                    os.close(store_fd)
            elif rendezvous is None:
                with socket.create_server((address, 0), backlog=spec.world_size) as store:
                    self.rendezvous = (address, int(store.getsockname()[1]))
                    self._start(address, [memory_fd], [memory_fd, store.fileno()])
            else:
                self._start(address, [memory_fd], [])
        except BaseException:  # nobody else will end the ranks that are there
            self.end()
            raise
        finally:
            os.close(memory_fd)

    def _start(self, address: str, fds: list[int], fds_of_rank_0: list[int]) -> None:
        spec = self._spec
        shared = {
            "function": spec.function, "world_size": spec.world_size, "args": dict(spec.args),
            "run_dir": str(spec.run_dir.absolute()), "collective_deadline_s": spec.collective_deadline_s,
            "num_gpus": spec.num_gpus, "rendezvous": self.rendezvous, "address": address,
            "here": [self._on_host.start, len(self._on_host)],
        }  # fmt: skip
        for rank in self.ranks:
            log = log_path(spec.run_dir.absolute(), rank)
            log.write_bytes(b"")
            arguments, given = {**shared, "rank": rank}, fds if rank else fds_of_rank_0
            child, reports = self._server.fork("verifier.launch.rank:run_rank", arguments, log_path=log, fds=given)
            self._processes[rank] = child, reports
            self._watched |= {reports: rank, child: rank}

    def tell(self, message: JSON) -> None:
        """Send every rank a JSON message."""
        for _, channel in self._processes.values():
            with suppress(ChannelClosed):  # a rank that is gone is found by `poll`
                channel.send(message)

    def poll(self, within_s: float) -> tuple[list[tuple[int, JSON]], float]:
        """Wait for something to happen, at most so many seconds.

        Returns:
            (rank, message) of all that happened, in order: a message of the rank (see `run_rank`), or a "failure" where
            it has ended; and the seconds that the longest waiting rank has waited in a collective.

        Raises:
            VerifierError: the fork server, or another process that its vigil watches, is gone.
        """
        messages: list[tuple[int, JSON]] = []
        for ready in self._server.vigil.wait(self._watched, within_s):
            rank = self._watched.get(ready)
            if rank is not None:
                messages += [(rank, message) for message in self._reported(rank)]
                if isinstance(ready, Child):
                    messages.append((rank, {"failure": self._buried(rank)}))
        since = [since_s for rank in self.ranks if (since_s := self._slots[rank].since_s) > 0]
        return messages, max(0.0, time.monotonic() - min(since)) if since else 0.0

    def slots(self) -> tuple[float, list[bytes]]:
        """Seconds of this node's monotonic clock, and each of its ranks' slot of the flight recorder, in rank order.

        A slot is packed; it is empty before its rank's first collective.
        """
        slots = [flight.read_slot(self._slots[rank]) for rank in self.ranks]
        return time.monotonic(), [*map(flight.packed, slots)]

    def stopped(self) -> list[int]:
        """Ranks of this node that a signal has stopped."""
        return [rank for rank, (child, _) in self._processes.items() if child.stopped]

    def look(self, within_s: float) -> None:
        """Raise the error of a process beside the ranks that has ended, or ends within so many seconds."""
        self._server.vigil.look(within_s)

    def stacks(self, ranks: Sequence[int]) -> dict[int, str]:
        """Python stacks of ranks of this node, as far as they can be had within two seconds."""
        for rank in ranks:
            self._processes[rank][0].send_signal(signal.SIGUSR1)
        give_up_at = time.monotonic() + _STACK_S
        while time.monotonic() < give_up_at and not all(watchdog.is_whole(self._stack(rank)) for rank in ranks):
            time.sleep(0.02)
        return {rank: self._stack(rank) for rank in ranks}

    def tail(self, rank: int, traceback: str) -> str:
        """The last lines of a rank's log; its traceback, if any, is put below them for whoever opens the file."""
        with suppress(FileNotFoundError), log_path(self._spec.run_dir, rank).open("rb+") as log:
            log.seek(max(0, log.seek(0, os.SEEK_END) - _TAIL_BYTES))
            tail = log.read().decode("utf-8", "replace")
            log.write(traceback.encode())
            return tail
        return ""

    def end(self) -> None:
        """Kill every rank of this node and whatever it started, and wait until they are gone."""
        for child, _ in self._processes.values():
            child.send_signal(signal.SIGKILL)
        for child, reports in self._processes.values():
            child.stop()
            reports.close()
        self._watched.clear()

    def _reported(self, rank: int) -> list[JSON]:
        """Reports of a rank so far: progress, answers, its result, or its failure."""
        reports, found = self._processes[rank][1], []
        while reports in self._watched and reports.wire.poll():
            try:
                found.append(reports.receive(_REPORT_S))
            except ChannelClosed:
                del self._watched[reports]
            except DeadlinePassed:
                del self._watched[reports]
                stopped = InternalError(f"stopped {_REPORT_S:g} s in the middle of a report")
                found.append({"failure": to_record(stopped)})
        return found

    def _buried(self, rank: int) -> Mapping[str, JSON]:
        """Record of a rank that has ended before the job has: a failure, whatever its exit status."""
        child = self._processes[rank][0]
        del self._watched[child]
        cause = child.cause_of_death()
        if cause is None:
            raise self._server.death()
        return {"kinds": [], "message": cause, "cause": cause, "traceback": ""}

    def _stack(self, rank: int) -> str:
        path = stack_path(self._spec.run_dir, rank)
        return path.read_text() if path.exists() else ""
