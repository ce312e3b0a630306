"""Start of the ranks of a training run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from verifier.config.training import TrainConfig
from verifier.launch.fork_launcher import ForkJob
from verifier.launch.rank import JobSpec
from verifier.runs.model_under_test import ModelUnderTest
from verifier.runs.resources import COLLECTIVE_DEADLINE_S, Deadline
from verifier.runs.spec import told_of
from verifier.trainer.worker_spec import WorkerSpec, optimizer_settings

PRELOAD = "verifier.trainer.preload_megatron:preload"
"""Function that a launcher's process calls before it forks ranks."""


class Launcher(Protocol):
    """Starts the ranks of a job: a `ForkLauncher`, or nodes of a cluster, each with one."""

    def submit(self, spec: JobSpec, on_progress: Callable[[int, str], None] | None = None) -> ForkJob:
        """See `ForkLauncher.submit`."""


def start_ranks(
    config: TrainConfig,
    model: ModelUnderTest,
    launcher: Launcher,
    folder: Path,
    until: Deadline,
    progress: Callable[[str], None],
    *,
    within: Sequence[str] = (),
    observer: str = "",
    num_gpus: int = 0,
) -> ForkJob:
    """Start ranks that serve the calls of `worker_megatron`.

    Args:
        config: of the run.
        model: of the run.
        launcher: with Megatron imported.
        folder: for their logs.
        until: deadline of the run.
        progress: called with a line of text.
        within: see `WorkerSpec.within`.
        observer: see `WorkerSpec.observer`.
        num_gpus: see `JobSpec.num_gpus`.
    """
    spec = WorkerSpec(
        **told_of(model), config=config, optimizer=optimizer_settings(config), within=within, observer=observer
    )  # fmt: skip
    job = JobSpec(
        function="verifier.trainer.worker_megatron:run", world_size=config.mesh.world_size, run_dir=folder / "logs",
        args=spec.to_json(), deadline_s=until.left("the ranks were started"),
        collective_deadline_s=COLLECTIVE_DEADLINE_S, mesh=config.mesh, num_gpus=num_gpus,
    )  # fmt: skip
    return launcher.submit(job, lambda rank, text: progress(text))
