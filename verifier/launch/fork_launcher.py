"""A launcher on one host: ranks are forked from a process that has imported what they need."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Self

from verifier.errors import UsageError
from verifier.launch.flight_recorder import MAX_RANKS
from verifier.launch.fork_job import ForkJob
from verifier.launch.fork_server import ForkServer
from verifier.launch.launcher import JobSpec, Launcher


class ForkLauncher(ForkServer, Launcher):
    """Starts the ranks of any number of jobs. Imports begin at `with`, while the caller goes on; the first job waits.

    Args:
        preload: "package.module:function", called without arguments before the first fork; it must start no thread.
        load_deadline_s: seconds that imports may take.
    """

    def __init__(self, *, preload: str = "", load_deadline_s: float = 300.0) -> None:
        super().__init__(
            *filter(None, ["verifier.launch.rank:preload", preload]),
            name="the process that forks ranks",
            # Whoever asks for GPUs while importing asks the driver's management library, which does not start CUDA.
            environment={"OMP_NUM_THREADS": "1", **os.environ, "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
            load_deadline_s=load_deadline_s,
        )

    def __enter__(self) -> Self:
        self.start()
        return self

    def submit(self, spec: JobSpec, on_progress: Callable[[int, str], None] | None = None) -> ForkJob:
        """See `Launcher.submit`; 1 to 128 ranks."""
        require_ranks(spec.world_size)
        return ForkJob(self, spec, on_progress)


def require_ranks(world_size: int) -> None:
    """Refuse a number of ranks that cannot be started.

    Raises:
        UsageError: fewer than one, or more than the flight recorder has room for.
    """
    if not 1 <= world_size <= MAX_RANKS:
        raise UsageError(f"{world_size} ranks asked for: this machine's launcher starts 1 to {MAX_RANKS}")
