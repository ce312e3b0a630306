"""The engine in its own process: started early, reached by a socket, gone with its owner. Torch-free."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Collection

import msgspec

from verifier.core.outputs import WorkFolder
from verifier.engine.api import EngineConfig
from verifier.engine.client import EngineClient, EngineGone
from verifier.errors import UsageError, VerifierError
from verifier.launch.child import end_of, last_lines, spawn
from verifier.launch.fork_server import ForkServer
from verifier.launch.watchdog import Vigil

VLLM_ENVIRONMENT = {
    # No separate engine core: the driver is this process, and its workers are forked from it.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "fork",
    # Whoever asks for GPUs while importing asks the driver's management library, which does not start CUDA.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
}
"""Set before torch and vLLM are imported: nothing is compiled, nothing is fetched."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
"""Keeps imports from starting threads, which a forked server would miss; it has its share of the cores afterwards."""
DEATH = "death"
"""File beside the socket in which a server leaves the reason that ended it."""
_GRACE_S, _HASTY_S = 10.0, 0.3
"""Seconds that a server has to end; after a failure."""
_LISTEN_S = 60.0
_MAX_DIRECTORY = 107 - len("/socket")
"""Bytes of a socket's path that Linux takes (unix(7), sun_path), less our file name."""


def engine_fork_server(load_deadline_s: float = 300.0, vigil: Vigil | None = None) -> ForkServer:
    """Configure the process that vLLM's engine servers are forked from; it starts with the first engine.

    Start engines from one thread that outlives them, and stop them before it. Importing vLLM has `load_deadline_s`.
    """
    return ForkServer(
        "verifier.engine.server:preload",
        name="the process that forks engines",
        environment={**VLLM_ENVIRONMENT, **ONE_THREAD},
        load_deadline_s=load_deadline_s,
        vigil=vigil,
    )


class EngineProcess(contextlib.AbstractContextManager["EngineProcess"]):
    """Starts an engine server, and does not wait for its model: start early. A fork server is waited for.

    Start it from a thread that outlives the engine: the kernel kills the server when that thread ends. Only kinds in
    `forks` are forked; without a fork server they get an interpreter of their own, as the others do. Errors call it
    `name`. Its death ends the waits of its `vigil`, and the death of another process there ends the waits of its
    clients.
    """

    def __init__(
        self, config: EngineConfig, fork_server: ForkServer | None = None, name: str = "the engine",
        vigil: Vigil | None = None, forks: Collection[str] = ("vllm",),
    ) -> None:  # fmt: skip
        self.config, self._name, self._fork_server, self.vigil = config, name, fork_server, vigil or Vigil()
        self._grace_s, self._last_log = _GRACE_S, b""
        self._folder = WorkFolder("engine")
        folder = self._folder.path
        self.socket_path, self._log = folder / "socket", folder / "engine.log"
        arguments = {"socket_path": str(self.socket_path), "config": msgspec.json.encode(config).decode()}
        with contextlib.ExitStack() as undo:
            undo.callback(self._folder.close)
            if len(os.fsencode(folder)) > _MAX_DIRECTORY:
                raise UsageError(
                    f"the folder for temporary files, `{folder.parent}`, has too long a name for sockets: set "
                    "TMPDIR to another"
                )
            if fork_server is None or config.kind not in forks:
                main = "verifier.engine.server:main"
                with self._log.open("wb") as log:
                    self._server = spawn(main, list(arguments.values()), log, death_signal=signal.SIGKILL)
            else:
                forked = "verifier.engine.server:forked"
                self._server, channel = fork_server.fork(forked, arguments, log_path=self._log)
                channel.close()
            undo.pop_all()
        self.vigil.keep(self._server, self.death)

    @property
    def pid(self) -> int:
        """Process id of the server; it leads the process group that its workers are in."""
        return self._server.pid

    def client(self, deadline_s: float = 300) -> EngineClient:
        """Connect. The server listens within moments; requests wait until its model is loaded, for `deadline_s` each.

        Raises:
            EngineGone: the server died first.
            InternalError: another process that its vigil watches died.
        """
        until = time.monotonic() + _LISTEN_S
        while True:
            if self.socket_path.exists():
                with contextlib.suppress(EngineGone):  # it may not listen yet, or have died since
                    return EngineClient(self.socket_path, deadline_s, self._name, self.vigil)
            self.vigil.look(0.02)
            if time.monotonic() > until:
                raise EngineGone(f"{self._name} did not listen within {_LISTEN_S:g} s{last_lines(self._log)}")

    def log(self) -> bytes:
        """The end of what the server and its workers wrote, after the end of the engine too."""
        return end_of(self._log) if self._log.is_file() else self._last_log

    def death(self) -> VerifierError:
        """The error of a server that has ended by itself, with its signal, and who died before it."""
        of_worker = self.socket_path.with_name(DEATH)
        cause = of_worker.read_text() if of_worker.is_file() else self._server.cause_of_death()
        if cause is None and self._fork_server is not None:
            return self._fork_server.death()
        return EngineGone(f"{self._name}'s process ended by itself ({cause}){last_lines(self._log)}")

    def ended(self, within_s: float) -> bool:
        """Wait at most so many seconds for the server's end; True if it has ended."""
        return self._server.ended(within_s)

    def watch(self, on: bool) -> None:
        """Have its death end the waits of its vigil, as it does from the start, or not."""
        if on and not self._server.ended():
            self.vigil.keep(self._server, self.death)
        else:
            self.vigil.drop(self._server)

    def hasten(self) -> None:
        """Ask it to end now, and give it little time for that later: what it was needed for has failed."""
        self._grace_s = _HASTY_S
        self._server.send_signal(signal.SIGTERM)

    def stop(self) -> None:
        """End the server and all its workers; nothing is left but the log, whatever state they are in."""
        self.vigil.drop(self._server)
        self._server.stop(self._grace_s)
        self._last_log = self.log()
        self._folder.close()

    def __exit__(self, *error: object) -> None:
        self.stop()
