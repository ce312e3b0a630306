"""The process that forks: it imports the heavy libraries once, then forks the ranks of each job and watches them.

It has one thread and starts none, since a fork copies only the thread that forks: libraries that were loaded must not
have threads that a rank would miss. It talks to its parent in JSON lines over one socket; when that closes, all end.
"""

from __future__ import annotations

import gc
import json
import os
import selectors
import signal
import socket
import time
from typing import Any, NoReturn

from verifier.launch.job import Order, RunningJob
from verifier.launch.rank import Capture, die_with_parent, resolve

JSON = Any
_TURN_S = 0.25
"""Longest sleep between two looks at the flight recorder."""
_HASTY_TURN_S = 0.02
"""The same while a job is ending."""


def main(parent_fd: int, parent_pid: int, bound_to_parent_thread: bool, preload: str) -> NoReturn:
    """Serve the parent until it goes away.

    Args:
        parent_fd: our end of the socket.
        parent_pid: the process that started us.
        bound_to_parent_thread: whether to die when the very thread that started us ends (it is the main thread).
        preload: "package.module:function" to call before the first fork; "" for none.
    """
    server = RankServer(socket.socket(fileno=parent_fd))
    signal.signal(signal.SIGTERM, lambda signum, frame: server.end())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if bound_to_parent_thread:
        die_with_parent(parent_pid, signal.SIGTERM)
    server.load(preload)
    signal.signal(signal.SIGTERM, lambda signum, frame: server.end())
    while True:
        server.turn()


class RankServer:
    """Jobs alive, and the wire to the parent."""

    def __init__(self, parent: socket.socket) -> None:
        self._parent = parent
        self._parent.setblocking(False)
        self._heard = bytearray()
        self._unsent = bytearray()
        self._jobs: dict[int, RunningJob] = {}
        self._selector = selectors.EpollSelector()
        self._selector.register(parent, selectors.EVENT_READ)

    def load(self, preload: str) -> None:
        """Import torch.distributed, wrap its collectives, call `preload`; report that, or end with the reason."""
        begin = time.monotonic()
        with Capture() as capture:
            import torch

            from verifier.launch import collectives

            torch.set_num_threads(1)
            collectives.install()
            if preload:
                resolve(preload)()
            gc.collect()
            gc.freeze()
        if capture.failure is not None:
            self._send({"event": "unready", **capture.failure})
        else:
            self._send({"event": "ready", "seconds": time.monotonic() - begin})

    def turn(self) -> None:
        """Wait for something to happen, at most 0.25 s, and deal with it."""
        ending = any(job.ending for job in self._jobs.values())
        events = self._selector.select((_HASTY_TURN_S if ending else _TURN_S) if self._jobs else None)
        heard = [key.data for key, _ in events if key.data is not None]
        for job, rank, kind in sorted(heard, key=lambda item: item[2]):
            if kind == "died":
                self._jobs[job].bury(rank)
                for fd in self._jobs[job].fds_of(rank):
                    self._selector.unregister(fd)
            elif self._jobs[job].ranks[rank].report_fd in self._selector.get_map():
                self._jobs[job].hear(rank)
        if any(key.data is None for key, _ in events):
            self._serve_parent()
        for job in list(self._jobs.values()):
            verdict = job.verdict()
            if verdict is not None:
                self._close(job)
                self._send(verdict)

    def _serve_parent(self) -> None:
        self._flush()
        try:
            data = self._parent.recv(1 << 20)
        except BlockingIOError:
            return
        except ConnectionError:
            self.end()
        if not data:
            self.end()
        self._heard += data
        *lines, rest = bytes(self._heard).split(b"\n")
        self._heard = bytearray(rest)
        for line in lines:
            message = json.loads(line)
            if message["command"] == "kill":
                job = self._jobs.get(message["job"])
                if job is not None:
                    job.kill()
                    self._close(job)
            else:
                self._start(Order(**message["order"]))

    def _start(self, order: Order) -> None:
        job = RunningJob(order, self._send)
        private = [self._parent.fileno(), self._selector.fileno()]
        private += [fd for other in self._jobs.values() for fd in other.fds()]
        with Capture() as capture:
            job.start(resolve(order.function), private)
        if capture.failure is not None:
            job.kill()
            job.close()
            self._send({"event": "refused", "job": order.job, **capture.failure})
            return
        self._jobs[order.job] = job
        for number, rank in enumerate(job.ranks):
            self._selector.register(rank.report_fd, selectors.EVENT_READ, (order.job, number, "said"))
            self._selector.register(rank.pid_fd, selectors.EVENT_READ, (order.job, number, "died"))

    def _close(self, job: RunningJob) -> None:
        for fd in job.fds():
            if fd in self._selector.get_map():
                self._selector.unregister(fd)
        job.close()
        del self._jobs[job.order.job]

    def _send(self, message: dict[str, JSON]) -> None:
        self._unsent += json.dumps(message).encode() + b"\n"
        self._flush()

    def _flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self._parent.send(self._unsent)]
        except BlockingIOError:
            pass
        except ConnectionError:
            self.end()
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if self._unsent else 0)
        self._selector.modify(self._parent, wanted)

    def end(self) -> NoReturn:
        """Kill every rank and whatever it started, and exit."""
        for job in self._jobs.values():
            job.kill()
        os._exit(0)
