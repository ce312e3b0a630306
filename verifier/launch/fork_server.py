"""The owner's end of a process that imports libraries once and forks children on request."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from verifier.errors import ContractError, InternalError

_END_S = 5.0


class ForkServer:
    """One process with vLLM loaded, which forks the hosts of any number of engines.

    It starts with the first engine, which waits for the imports. Use it from one thread that outlives the engines, and
    stop them first. If the owner dies, so does everything.

    Args:
        module: whose `__main__` forks; gets the socket's descriptor and the owner's process id.
        environment: of that process, over the owner's.
        load_deadline_s: seconds that importing vLLM may take.
    """

    def __init__(self, module: str, environment: Mapping[str, str], load_deadline_s: float = 300.0) -> None:
        self._module, self._environment = module, dict(environment)
        self._load_deadline_s = load_deadline_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ForkServer:
        return self

    def _begin(self) -> subprocess.Popen[bytes]:
        self._socket, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", self._module, str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, pass_fds=[theirs.fileno()],
                env={**os.environ, **self._environment}, start_new_session=True,
            )  # fmt: skip
        return self._process

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process is None:
            return
        self._socket.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_S)
        self._process.kill()
        self._process.wait()
        self._log.close()

    @property
    def pid(self) -> int:
        """Process id of the forking process.

        Raises:
            ContractError: it was not started yet.
        """
        if self._process is None:
            raise ContractError("no engine was started from this fork_server yet")
        return self._process.pid

    def start(self, socket_path: Path, config: Any, log_path: Path) -> ForkedHost:
        """Fork a host; it listens within moments, and loads the model while the caller goes on.

        Args:
            socket_path: where it shall listen.
            config: of the engine.
            log_path: receives the host's and its workers' output.

        Raises:
            InternalError: vLLM could not be imported, or not in time.
        """
        process = self._process or self._begin()
        order = {"socket": str(socket_path), "config": config.to_json(), "log": str(log_path)}
        self._socket.settimeout(self._load_deadline_s)
        try:
            self._socket.sendall(json.dumps(order).encode() + b"\n")
            data, fds, _, _ = socket.recv_fds(self._socket, 64, 1)
        except TimeoutError as error:
            process.kill()  # a late answer would be taken for the next engine's
            late = f"vLLM was not imported within {self._load_deadline_s:g} s by the process that forks engines"
            raise InternalError(late) from error
        except ConnectionError as error:
            raise self._gone() from error
        if not data:
            raise self._gone()
        return ForkedHost(int(data), fds[0])

    def _gone(self) -> InternalError:
        self._log.seek(0)
        words = self._log.read().decode(errors="replace").splitlines()[-12:]
        return InternalError("\n".join(["the process that forks engines died; its last words:", *words]))


class ForkedHost:
    """A host that another process forked: what `subprocess.Popen` is to a child of one's own."""

    def __init__(self, pid: int, pid_fd: int) -> None:
        self.pid = pid
        self._pid_fd = pid_fd
        self._ended = False

    def poll(self) -> int | None:
        """None while it lives. How it ended only its parent knows: 0 then."""
        if not self._ended and select.select([self._pid_fd], [], [], 0)[0]:
            os.close(self._pid_fd)
            self._ended = True
        return 0 if self._ended else None

    def terminate(self) -> None:
        """Ask it to end."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pid_fd, signal.SIGTERM)

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end.

        Raises:
            subprocess.TimeoutExpired: it lives on.
        """
        until = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            if until is not None and time.monotonic() > until:
                raise subprocess.TimeoutExpired("engine host", timeout or 0)
            time.sleep(0.02)
        return 0
