"""The process that vLLM's hosts are forked from: vLLM is imported once, however many engines follow. Torch-free.

A host that is forked, and forks its workers, is ready in seconds; one with an interpreter of its own imports vLLM in
itself and in every worker, and a third time to look at the model's class.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from verifier.engine.engine import EngineConfig, package_root
from verifier.engine.process import die_with_parent
from verifier.errors import ContractError, InternalError

_END_S = 5.0
_BEFORE_IMPORT = {
    # One thread, or a forked host misses the others; a host has its own share of the cores afterwards.
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class EngineNursery:
    """One process with vLLM loaded, which forks the hosts of any number of engines.

    It starts with the first engine, which waits for the imports. Use it from one thread that outlives the engines, and
    stop them first. If the owner dies, so does everything.

    Args:
        load_deadline_s: seconds that importing vLLM may take.
    """

    def __init__(self, load_deadline_s: float = 300.0) -> None:
        self._load_deadline_s = load_deadline_s
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> EngineNursery:
        return self

    def _begin(self) -> subprocess.Popen[bytes]:
        from verifier.engine.server import VLLM_ENVIRONMENT

        self._socket, theirs = socket.socketpair()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        root = os.pathsep.join(filter(None, [str(package_root()), os.environ.get("PYTHONPATH", "")]))
        with theirs:
            self._process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "verifier.engine.fork_server", str(theirs.fileno()), str(os.getpid())],
                stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, pass_fds=[theirs.fileno()],
                env={**os.environ, **VLLM_ENVIRONMENT, **_BEFORE_IMPORT, "PYTHONPATH": root}, start_new_session=True,
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
            raise ContractError("no engine was started from this nursery yet")
        return self._process.pid

    def start(self, socket_path: Path, config: EngineConfig, log_path: Path) -> ForkedHost:
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


def preload() -> None:
    """Import all that a vLLM host will need; nothing if vLLM is not installed, which each host then says itself.

    Raises:
        InternalError: an import has started CUDA, so that nothing could be forked.
    """
    if importlib.util.find_spec("vllm") is None:
        return
    import torch

    from verifier.engine.vllm import engine_vllm
    from verifier.platform.cuda import require_not_started

    engine_vllm.preload()
    if torch.cuda.device_count():
        require_not_started()


def main(parent_fd: int, parent_pid: int) -> None:
    """Fork hosts as the parent orders them, until it goes away; then end them all."""
    die_with_parent()
    if os.getppid() != parent_pid:  # it died before the line above
        return
    parent = socket.socket(fileno=parent_fd)
    preload()
    gc.collect()
    gc.freeze()
    poller = select.poll()
    poller.register(parent, select.POLLIN)
    hosts: dict[int, int] = {}
    """File descriptor of a host -> its pid."""
    heard = bytearray()
    while True:
        for fd, _ in poller.poll():
            if fd in hosts:
                poller.unregister(fd)
                os.waitpid(hosts.pop(fd), 0)
                os.close(fd)
                continue
            data = parent.recv(1 << 16)
            if not data:
                _end(list(hosts.values()))
            heard += data
            while b"\n" in heard:
                line, _, rest = bytes(heard).partition(b"\n")
                heard = bytearray(rest)
                pid = os.fork()
                if pid == 0:
                    _be_host(json.loads(line), [parent.detach(), *hosts])
                host_fd = os.pidfd_open(pid)
                socket.send_fds(parent, [str(pid).encode()], [host_fd])
                hosts[host_fd] = pid
                poller.register(host_fd, select.POLLIN)


def _be_host(order: dict[str, Any], private_fds: list[int]) -> NoReturn:
    """In the forked process: what `python -m verifier.engine.server` is in one of its own."""
    from verifier.engine import server

    try:
        for fd in private_fds:
            os.close(fd)
        os.setsid()
        log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.close(log)
        server.main(order["socket"], json.dumps(order["config"]), str(os.getppid()))
    finally:
        if not isinstance(sys.exception(), SystemExit | None):
            traceback.print_exc()  # no interpreter will: this process ends here
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _end(groups: list[int]) -> NoReturn:
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
    os._exit(0)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
