"""The engine in its own process: started early, reached by a socket, gone with its parent. Torch-free."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Protocol

from verifier.engine.api import EngineConfig, package_root
from verifier.engine.client import EngineClient, EngineGone
from verifier.errors import UsageError
from verifier.launch.fork_server import ForkServer

_PR_SET_PDEATHSIG = 1
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
_GRACE_S = 10.0
_MAX_DIRECTORY = 107 - len("/socket.opening")
"""Bytes of a socket's path that Linux takes (unix(7), sun_path), less our longest file name."""


def die_with_parent() -> None:
    """Have the kernel kill this process when the thread that created it ends, however it ends (Linux only)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def keep_freed_memory() -> None:
    """Have this process reuse the memory of large tensors; given back, every next one's pages are faulted in anew.

    Of a scan of state-space layers on a host that takes longer than the arithmetic does.

    Source:
        mallopt(3): no allocation is a mapping of its own, and the heap's top is not trimmed (glibc; elsewhere nothing
        changes).
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_MAX, 0)
        mallopt(_M_TRIM_THRESHOLD, -1)


class Host(Protocol):
    """A host's process, our own child or not."""

    @property
    def pid(self) -> int:
        """Its process id."""

    def poll(self) -> int | None:
        """None while it lives."""

    def terminate(self) -> None:
        """Ask it to end."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; `subprocess.TimeoutExpired` if it lives on."""


def engine_fork_server(load_deadline_s: float = 300.0) -> ForkServer:
    """The process that vLLM's engine servers are forked from; it starts with the first engine.

    Args:
        load_deadline_s: seconds that importing vLLM may take.
    """
    from verifier.engine.fork_server import BEFORE_IMPORT
    from verifier.engine.server import VLLM_ENVIRONMENT

    root = os.pathsep.join(filter(None, [str(package_root()), os.environ.get("PYTHONPATH", "")]))
    environment = {**VLLM_ENVIRONMENT, **BEFORE_IMPORT, "PYTHONPATH": root}
    return ForkServer("verifier.engine.fork_server", environment, load_deadline_s)


class EngineProcess:
    """Starts an engine host, and does not wait for its model: start early. A fork server is waited for.

    Start it from a thread that outlives the engine: the kernel kills the host when that thread ends.

    Args:
        config: of the engine.
        log_path: receives the host's and its workers' output; in the socket's directory if not given.
        fork_server: forks the server, if that is vLLM's; without one it gets an interpreter of its own.
        name: what errors call it.
    """

    def __init__(
        self,
        config: EngineConfig,
        log_path: Path | None = None,
        fork_server: ForkServer | None = None,
        name: str = "the engine",
    ) -> None:
        self.config, self._name = config, name
        self._directory = Path(tempfile.mkdtemp(prefix="verifier-engine-"))
        self.socket_path = self._directory / "socket"
        self.log_path = log_path or self._directory / "engine.log"
        with contextlib.ExitStack() as undo:
            undo.callback(shutil.rmtree, self._directory, ignore_errors=True)
            if len(os.fsencode(self._directory)) > _MAX_DIRECTORY:
                raise UsageError(
                    f"the folder for temporary files, `{self._directory.parent}`, has too long a name for sockets: set "
                    "TMPDIR to another"
                )
            self._process: Host
            if fork_server is None or config.kind != "vllm":
                self._process = self._own_interpreter()
            else:
                self._process = fork_server.start(self.socket_path, config, self.log_path)
            undo.pop_all()

    def _own_interpreter(self) -> subprocess.Popen[bytes]:
        root = os.pathsep.join(filter(None, [str(package_root()), os.environ.get("PYTHONPATH", "")]))
        order = [str(self.socket_path), json.dumps(self.config.to_json()), str(os.getpid())]
        with self.log_path.open("wb") as log:
            return subprocess.Popen(  # noqa: S603 - our own interpreter and module
                [sys.executable, "-m", "verifier.engine.server", *order],
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
                env={**os.environ, "PYTHONPATH": root},
            )  # fmt: skip

    @property
    def pid(self) -> int:
        """Of the host; it leads the process group that its workers are in."""
        return self._process.pid

    def client(self, deadline_s: float = 300) -> EngineClient:
        """Connect. The host listens within moments; requests wait until its model is loaded.

        Args:
            deadline_s: for each request of this client that names none.

        Raises:
            EngineGone: the host died first.
        """
        until = time.monotonic() + 60
        while True:
            if self.socket_path.exists():
                with contextlib.suppress(EngineGone):  # it may have died since
                    return EngineClient(self.socket_path, self.log_path, deadline_s, self._name)
            ended = self._process.poll()
            if ended is not None or time.monotonic() > until:
                why = "did not listen" if ended is None else f"ended with {ended}"
                words = self.log_path.read_text(errors="replace").splitlines()[-12:]
                raise EngineGone("\n".join([f"{self._name}'s process {why}; its last words:", *words]))
            time.sleep(0.02)

    def stop(self) -> None:
        """End the host and all its workers; nothing is left, whatever state they are in."""
        if self._process.poll() is None:
            self._process.terminate()
        until = time.monotonic() + _GRACE_S
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_GRACE_S)
        while self._group_alive() and time.monotonic() < until:  # workers, and what frees their shared memory
            time.sleep(0.02)
        if self._group_alive():
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        shutil.rmtree(self._directory, ignore_errors=True)

    def _group_alive(self) -> bool:
        self._process.poll()
        try:
            os.killpg(self._process.pid, 0)
        except ProcessLookupError:
            return False
        return True

    def __enter__(self) -> EngineProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
