"""A process that imports libraries once, and forks children that have them: the ranks of jobs, and engine servers.

A child begins in milliseconds and shares the memory of what was imported. The process has one thread and starts none,
since a fork copies only the thread that forks. When its owner closes the channel or dies, it kills its children, each
with its process group, and ends; when it is killed itself, the kernel kills its children.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pipe, connection, reduction
from pathlib import Path
from typing import IO, Any, NoReturn

from verifier.errors import ContractError, InternalError, VerifierError
from verifier.launch.channel import Channel, ChannelClosed, DeadlinePassed, spawned
from verifier.launch.child import Child, die_with_parent, last_lines, resolve
from verifier.launch.failures import error_from, to_record
from verifier.launch.watchdog import Vigil

_REPLY_S = 60.0
"""Seconds that a fork, or the collection of a child's exit status, may take."""
_END_S = 5.0
_UNHEARD_S = 0.1
"""Seconds for a message that was sent before its sender ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lent:
    """A fork server that another process has started for this one, and that ends with this end of its channel."""

    pid: int
    fd: int
    log: Path


class ForkServer:
    """The owner's end. Use it from one thread.

    `preloads` are called once, in this order, before the first fork; they must start no thread, and may take
    `load_deadline_s`. Errors call the process `name`. It is watched beside the processes of `vigil`, whose death ends
    the wait for the preloads. One that is `lent` has been started already, with preloads of its own; None starts one.
    """

    def __init__(
        self,
        *preloads: str,
        name: str,
        environment: Mapping[str, str] | None = None,
        load_deadline_s: float = 300.0,
        vigil: Vigil | None = None,
        lent: Lent | None = None,
    ) -> None:
        self.vigil, self._lent = vigil or Vigil(), lent
        self._preloads, self._name, self._environment = preloads, name, environment
        self._load_deadline_s = load_deadline_s
        self._process: Child | None = None
        self._loaded = False
        self._death: VerifierError | None = None

    def __enter__(self) -> ForkServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process and its preloads, and go on; nothing if it was started."""
        if self._process is not None or self._death is not None:
            return
        self._log: IO[bytes]
        self._loaded = False
        if self._lent is None:
            self._spawn()
        else:
            self._channel = Channel(connection.Connection(self._lent.fd))
            self._log = self._lent.log.open("rb")
            self._process = Child(self._lent.pid, lambda: None)
        assert self._process is not None, "it was just started"
        self.vigil.keep(self._process, self.death)
        self._load_until = time.monotonic() + self._load_deadline_s

    def _spawn(self) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        on_main_thread = threading.current_thread() is threading.main_thread()
        self._process, self._channel = spawned(
            "verifier.launch.fork_server:serve", self._preloads, self._log, environment=self._environment,
            death_signal=signal.SIGTERM if on_main_thread else 0,
        )  # fmt: skip

    @property
    def pid(self) -> int:
        """Process id, and id of its session.

        Raises:
            ContractError: it was not started, or is closed.
        """
        if self._process is None:
            raise self._death or ContractError(f"{self._name} is not running: use it in a with block")
        return self._process.pid

    def wait_ready(self) -> None:
        """Wait until the preloads have returned.

        Raises:
            UsageError: a preload refused, for instance because a version is not supported.
            StackFailed: a preload failed inside the stack under test.
            InternalError: a preload failed otherwise, or they did not end within their deadline.
        """
        if self.pid and not self._loaded:
            what = f"load {', '.join(self._preloads)} within {self._load_deadline_s:g} s"
            record = self._receive(self._load_until - time.monotonic(), what, self.vigil)
            if record is not None:
                self._death = self._refused(record)
                self.close()
                raise self._death
            self._loaded = True

    def fork(
        self, function: str, arguments: Mapping[str, Any], *, log_path: Path, fds: Sequence[int] = ()
    ) -> tuple[Child, Channel]:
        """Call a function in a forked child that leads a session; returns the child and this end of the channel.

        The function is called with the child's end of a channel, its own descriptors of `fds`, and the arguments by
        keyword. `log_path` receives stdout and stderr. The first fork waits for the preloads.
        """
        self.start()
        self.wait_ready()
        ours, theirs = Pipe()
        order = {"function": function, "arguments": dict(arguments), "log": str(log_path), "num_fds": 1 + len(fds)}
        with theirs:
            pid = self._ask({"fork": order}, [theirs.fileno(), *fds])
        return Child(pid, partial(self._collect, pid)), Channel(ours)

    def death(self) -> VerifierError:
        """The error of a preload that nobody has asked for; else how the process ended, and what it printed last."""
        if self._process is not None:
            cause = self._process.cause_of_death() if self._process.ended(_END_S) else "without an exit status"
            ended = InternalError(f"{self._name} ended by itself ({cause}){last_lines(self._log)}")
            self._death = self._unheard() or ended
            self.close()
        return self._death or InternalError(f"{self._name} was closed")

    def close(self) -> None:
        """End all children and the process; nothing is left when this returns."""
        process, self._process = self._process, None
        if process is not None:
            self.vigil.drop(process)
            self._channel.close()
            if self._lent is None:
                process.stop(_END_S)
            else:  # who started it collects it
                process.ended(_END_S)
            self._log.close()

    def _unheard(self) -> VerifierError | None:
        """The error of a preload, if the process has reported one that was not read."""
        record = None
        if not self._loaded:
            with contextlib.suppress(ChannelClosed, DeadlinePassed):
                record = self._channel.receive(_UNHEARD_S)
        return None if record is None else self._refused(record)

    def _refused(self, record: Any) -> VerifierError:
        return error_from(record, f"{self._name} could not load", self._name)

    def _collect(self, pid: int) -> int | None:
        with contextlib.suppress(InternalError):
            if self._process is not None:
                return self._ask({"collect": pid})
        return None

    def _ask(self, request: dict[str, Any], fds: Sequence[int] = ()) -> Any:
        try:
            self._channel.send(request)
            for fd in fds:
                reduction.send_handle(self._channel.wire, fd, None)
        except (ChannelClosed, ConnectionError):
            raise self.death() from None
        return self._receive(_REPLY_S, f"answer within {_REPLY_S:g} s")

    def _receive(self, deadline_s: float, what: str, vigil: Vigil | None = None) -> Any:
        try:
            return self._channel.receive(deadline_s, vigil)
        except DeadlinePassed:
            self._death = InternalError(f"{self._name} did not {what}")
            self.close()
            raise self._death from None
        except ChannelClosed:
            raise self.death() from None


def serve(owner_fd: str, *preloads: str) -> NoReturn:
    """Be the fork server."""
    be_server(Channel(connection.Connection(int(owner_fd))), [partial(call, name) for name in preloads])


def call(function: str) -> None:
    """Call "package.module:function" without arguments."""
    resolve(function)()


def be_server(owner: Channel, preloads: Sequence[Callable[[], object]]) -> NoReturn:
    """Be the fork server, in a process that may itself be forked."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for preload in preloads:
            preload()
    except BaseException as error:  # reported to the owner, who raises it
        owner.send(to_record(error))
        raise
    gc.collect()
    gc.freeze()
    children: set[int] = set()
    signal.signal(signal.SIGTERM, lambda signum, frame: _end(children))
    with contextlib.suppress(ChannelClosed):
        owner.send(None)
        while True:
            request = owner.receive()
            if "fork" in request:
                reply = _fork(owner, **request["fork"])
                children.add(reply)
            else:
                _, status = os.waitpid(request["collect"], 0)
                children.remove(request["collect"])
                reply = os.waitstatus_to_exitcode(status)
            owner.send(reply)
    _end(children)


def _end(children: set[int]) -> NoReturn:
    for pid in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)
    os._exit(0)


def _fork(owner: Channel, function: str, arguments: dict[str, Any], log: str, num_fds: int) -> int:
    fds = [reduction.recv_handle(owner.wire) for _ in range(num_fds)]
    sys.stdout.flush()
    sys.stderr.flush()
    server_pid = os.getpid()
    pid = os.fork()
    if pid == 0:
        _be_child(owner, server_pid, function, arguments, log, fds)
    for fd in fds:
        os.close(fd)
    return pid


def _be_child(
    owner: Channel, server_pid: int, function: str, arguments: dict[str, Any], log: str, fds: list[int]
) -> NoReturn:
    """Drop what is the fork server's and call the function, in the forked process; never return into its loop."""
    status = 1
    try:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, signal.SIG_DFL)
        die_with_parent(server_pid)
        owner.close()
        os.setsid()
        with open(log, "ab") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        resolve(function)(Channel(connection.Connection(fds[0])), *fds[1:], **arguments)
        status = 0
    except SystemExit as asked:
        status = asked.code if isinstance(asked.code, int) else int(asked.code is not None)
    except BaseException:
        traceback.print_exc()  # no interpreter will: this process ends here
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
