"""The launcher protocol: run a function on the ranks of a mesh. Light: loads neither torch nor anything that needs it.

    with ForkLauncher(preload="verifier.model.provider_megatron:preload") as launcher:
        results = launcher.run("package.module:function", world_size=4, args={"seed": 1}, run_dir=path, deadline_s=300)

`function` gets a `RankContext` and returns something that JSON can carry; `results` has one such value per rank.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from verifier.errors import UsageError
from verifier.mesh.mesh import Mesh

JSON = Any


class Rendezvous(NamedTuple):
    """Address of the store at which the ranks of a job meet."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """A function, and the ranks that call it.

    Raises:
        UsageError: a number of ranks that is not the mesh's.
    """

    function: str
    """"package.module:function", called with a RankContext on every rank; returns what JSON can carry."""
    world_size: int
    run_dir: Path
    """Gets a log per rank; made if absent."""
    args: Mapping[str, JSON] = field(default_factory=dict)
    """JSON values; `context.args` on the ranks."""
    deadline_s: float = 600.0
    """Seconds for the whole job."""
    collective_deadline_s: float = 120.0
    """Seconds that any rank may wait in one collective."""
    mesh: Mesh | None = None
    """Names each rank's coordinates in errors."""
    num_gpus: int = 0
    """Number of a host's GPUs, which its ranks take in turn; 0: all."""

    def __post_init__(self) -> None:
        if self.mesh is not None and self.mesh.world_size != self.world_size:
            has = f"mesh {self.mesh.label()} has {self.mesh.world_size} ranks"
            raise UsageError(f"{has}, but {self.world_size} were asked for")

    def place(self, rank: int) -> str:
        """Coordinates of a rank; empty where no mesh is known."""
        return "" if self.mesh is None else str(self.mesh.coordinate(rank))


class Job(Protocol):
    """A function under way on its ranks."""

    @property
    def done(self) -> bool:
        """True if `wait` would return or raise at once."""

    def wait(self) -> list[JSON]:
        """Wait for all ranks to return.

        Returns:
            Each rank's result, in rank order.

        Raises:
            RankFailed: a rank raised (other than below), exited or was killed; all others were killed at once.
            CollectiveTimeout: a collective waited longer than its deadline; names the ranks that did not come.
            JobTimeout: the job passed its deadline.
            UsageError, ContractError: a rank raised it; the RankFailed is its cause.
            InternalError: a process of the launcher is gone or answers no more.
        """

    def kill(self) -> None:
        """End all ranks, and what they have started."""


class Launcher(Protocol):
    """Starts jobs. Several may be alive at once."""

    @abstractmethod
    def submit(self, spec: JobSpec, on_progress: Callable[[int, str], None] | None = None) -> Job:
        """Start a job.

        Args:
            spec: the job.
            on_progress: called with (rank, text) for each `context.progress`, while the job is waited for.

        Raises:
            UsageError: more ranks than can be started, or a library that is not supported.
            InternalError: a process of the launcher is gone or did not load.
        """

    def run(
        self, function: str, *, on_progress: Callable[[int, str], None] | None = None, **options: Any
    ) -> list[JSON]:
        """Submit a `JobSpec` of these fields, and wait."""
        return self.submit(JobSpec(function=function, **options), on_progress).wait()
