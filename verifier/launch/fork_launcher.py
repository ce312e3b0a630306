"""A launcher on one host: ranks are forked from a process that has imported what they need."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import TracebackType
from typing import Self

from verifier.errors import UsageError
from verifier.launch.flight_recorder import MAX_RANKS
from verifier.launch.fork_job import ForkJob
from verifier.launch.fork_server import ForkServer
from verifier.launch.launcher import JobSpec, Launcher


class ForkLauncher(Launcher):
    """Starts the ranks of any number of jobs. Imports begin at `with`, while the caller goes on; the first job waits.

    Use it from one thread.

    Args:
        preload: "package.module:function", called without arguments before the first fork; it must start no thread.
        load_deadline_s: seconds that imports may take.
    """

    def __init__(self, *, preload: str = "", load_deadline_s: float = 300.0) -> None:
        # Whoever asks for GPUs while importing asks the driver's management library, which does not start CUDA.
        environment = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
        environment["OMP_NUM_THREADS"] = os.environ.get("OMP_NUM_THREADS", "1")
        self._server = ForkServer(
            *filter(None, ["verifier.launch.rank:preload", preload]),
            name="the process that forks ranks",
            environment=environment,
            load_deadline_s=load_deadline_s,
        )

    def __enter__(self) -> Self:
        self._server.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the fork server."""
        return self._server.pid

    def ready(self) -> None:
        """Wait until the libraries are loaded; see `ForkServer.wait_loaded`."""
        self._server.wait_loaded()

    def submit(self, spec: JobSpec, on_progress: Callable[[int, str], None] | None = None) -> ForkJob:
        """See `Launcher.submit`; 1 to 128 ranks."""
        require_ranks(spec.world_size)
        return ForkJob(self._server, spec, on_progress)

    def close(self) -> None:
        """End every job and the fork server; nothing is left when this returns."""
        self._server.close()


def require_ranks(world_size: int) -> None:
    """Refuse a number of ranks that cannot be started.

    Raises:
        UsageError: fewer than one, or more than the flight recorder has room for.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise UsageError(f"{world_size} ranks asked for: this machine's launcher starts 1 to {MAX_RANKS}")
