"""Start of the ranks of a training run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from verifier.algorithms.registry import LossOptions
from verifier.config.training import TrainConfig
from verifier.core.stage import Stage
from verifier.launch.fork_launcher import ForkJob, Launcher
from verifier.launch.rank import JobSpec
from verifier.runs.model_under_test import ModelUnderTest
from verifier.runs.resources import COLLECTIVE_DEADLINE_S, Deadline
from verifier.runs.spec import RankSpec, told_of

PRELOAD = "verifier.trainer.preload_megatron:preload"
"""Function that a launcher's process calls before it forks ranks."""


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

    Their logs go to `folder`. For `within` and `observer` see `WorkerSpec`, for `num_gpus` see `JobSpec`.
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


CALLS = {
    "load": Stage.LOAD, "connect": Stage.TRANSPORT, "score": Stage.LOGPROB, "train": Stage.TRAIN,
    "sync": Stage.TRANSPORT, "observe": Stage.ENGINE,
    "save": Stage.CHECKPOINT, "saved": Stage.CHECKPOINT, "evaluate": Stage.LOGPROB, "export": Stage.EXPORT,
}  # fmt: skip
"""Methods that the controller calls, and the stage that each is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSpec(RankSpec):
    """Everything that a rank needs to know before its first call."""

    config: TrainConfig
    optimizer: dict[str, Any]
    """Fields of `StepSettings`."""
    observer: str = ""
    """"package.module:Class" of a `RankObserver`; empty for a run that nobody looks at."""

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> WorkerSpec:
        """Inverse of `to_json`."""
        return cls(**{**record, "config": TrainConfig.from_dict(record["config"])})


def optimizer_settings(config: TrainConfig) -> dict[str, Any]:
    """Fields of `StepSettings` that a config asks for."""
    return {**asdict(config.optimizer), "decay_steps": max(config.num_updates, config.optimizer.warmup_steps + 1)}


def loss_of(config: TrainConfig) -> tuple[str, LossOptions]:
    """Name and options of the loss that ranks apply."""
    options = config.grpo
    if config.algorithm == "sft":
        return "cross_entropy", LossOptions()
    return options.loss, LossOptions(
        clip_low=options.clip_low, clip_high=options.clip_high, dual_clip=options.dual_clip,
        kl_weight=options.kl_weight if options.kl_in == "loss" else 0.0, kl_kind=options.kl_kind,
        entropy_weight=options.entropy_weight,
    )  # fmt: skip
