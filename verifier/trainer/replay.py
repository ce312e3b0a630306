"""Replay of one step of a recorded run: the same gradients, bit by bit, from its batches and a checkpoint before it.

No engine, sampling or scoring: the recorded columns of each batch are taken. The run's folder is only read.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from verifier.config.cluster import RayOptions
from verifier.config.training import (
    CheckpointOptions,
    EvaluationOptions,
    ProfileOptions,
    TrainConfig,
    VerifyOptions,
)
from verifier.core.ledger import read_rows
from verifier.core.outputs import work_folder
from verifier.errors import UsageError
from verifier.launch.fork_launcher import Launcher
from verifier.runs.derived_layout import with_kept_layout
from verifier.runs.model_under_test import open_model
from verifier.runs.resources import Deadline, Resources
from verifier.trainer import update_log
from verifier.trainer.checkpoint_folder import Checkpoints
from verifier.trainer.fitting import require_fit
from verifier.trainer.ranks import PRELOAD, start_ranks
from verifier.trainer.run_folder import KNOBS, RunFolder, other_knobs
from verifier.trainer.update_log import RankUpdate

EXPORTED_BEFORE = Path("first") / "hf_model"
"""Weights within a run's folder that a run before it, `first`, has made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GradientDifference:
    """The first gradient that is not what was recorded."""

    step: int
    rank: int
    number: int
    """Number of the optimizer step."""
    name: str
    """Parameter."""
    count: int
    """Tensors of the same update that differ, over all ranks."""
    losses: tuple[float, float]
    """Loss of the update: recorded, replayed."""
    grad_norms: tuple[float, float]
    """L2 norm of its gradient: recorded, replayed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Replayed:
    """End of a replay."""

    step: int
    begun_at: int
    """Step of the checkpoint that it began with; 0 for the initial weights."""
    num_tensors: int
    """Gradients of the step that were compared, over all ranks and updates."""
    difference: GradientDifference | None
    """In this step, or in one before it that had to be trained again."""


def with_weights_of(config: TrainConfig, run: Path) -> TrainConfig:
    """Return a config that begins with the weights that the run before a run left in its folder, if there was one.

    The folder may have been moved or be named otherwise since.
    """
    trained = run / EXPORTED_BEFORE
    begins_with_trained = config.first is not None or Path(config.model).parts[-2:] == EXPORTED_BEFORE.parts
    return replace(config, model=str(trained), first=None) if begins_with_trained and trained.is_dir() else config


def replay_step(
    config: TrainConfig,
    run: Path,
    step: int,
    progress: Callable[[str], None],
    *,
    launcher: Launcher | None = None,
) -> Replayed:
    """Train from the last checkpoint before a step up to it, on the recorded batches, and compare all gradients.

    The folder `run` may be in use. The launcher has Megatron imported; None starts one.

    Raises:
        UsageError: not a recorded run, or one of other knobs; the step, a batch or a rank's lines are not there.
        VerifierError: a process died or hung.
    """
    until = Deadline(config.timeout_s)
    config = with_weights_of(config, run)
    require_same_knobs(config, run)
    at, refused = None, dict[int, str]()
    if (run / "checkpoints").is_dir():
        at, refused = Checkpoints(run / "checkpoints", config.checkpoint.keep).last_whole(before=step)
    for reason in refused.values():
        progress(reason)
    begun_at = 0 if at is None else at.step
    ranks = range(config.mesh.world_size)
    recorded = [[item for item in update_log.read(run, rank) if begun_at < item.step <= step] for rank in ranks]
    steps = _require_replayable(config, run, step, begun_at, recorded)
    model = open_model(config.model, config.dtype, config.mesh, config.ray.nodes)
    require_fit(config, model.checkpoint.config, model.tier)
    model = with_kept_layout(config, model, run)
    with work_folder("replay") as folder, contextlib.ExitStack() as stack:
        own = replace(
            config, run=folder, steps=steps, verify=VerifyOptions(), evaluation=EvaluationOptions(),
            checkpoint=CheckpointOptions(), profile=ProfileOptions(), ray=RayOptions(),
        )  # fmt: skip
        if launcher is None:
            progress("importing Megatron")
            launcher = stack.enter_context(Resources(preload=PRELOAD)).launcher(until)
        job = start_ranks(own, model, launcher, folder, until, progress)
        stack.callback(job.kill)
        resume: dict[str, Any] = {}
        if at is not None:
            resume = {
                "resume": str(run / "checkpoints" / f"{at.step:06d}"), "same_mesh": at.mesh == config.mesh.label()
            }  # fmt: skip
        job.call("load", **resume)
        for update in recorded[0]:
            progress(f"replaying step {update.step}, update {update.number}")
            (batch := folder / update.batch).write_bytes(RunFolder(run).read_batch(update.step, update.batch))
            job.call(
                "train", step=update.step, number=update.number, batch=str(batch), first=update.first, last=False
            )  # fmt: skip
            batch.unlink()
        job.finish()
        replayed = [update_log.read(folder, rank) for rank in ranks]
    return Replayed(
        step=step, begun_at=begun_at, difference=_first_difference(recorded, replayed),
        num_tensors=sum(len(item.gradients) for updates in recorded for item in updates if item.step == step),
    )  # fmt: skip


def require_same_knobs(config: TrainConfig, run: Path) -> None:
    """Raise a UsageError for the first knob in which a config and a recorded run differ and must not."""
    if not (run / KNOBS).exists():
        raise UsageError(f"--replay `{run}` is no folder of a run: it has no {KNOBS}")
    for other in other_knobs(run, config):
        begins_with_trained = other.key == "model" and Path(config.model) == run / EXPORTED_BEFORE
        if begins_with_trained and Path(str(other.found)).parts[-2:] == EXPORTED_BEFORE.parts:
            continue
        raise UsageError(f"--replay `{run}` is {other.text}: give the config of the run, or leave it out")


def _require_replayable(
    config: TrainConfig, run: Path, step: int, begun_at: int, recorded: Sequence[Sequence[RankUpdate]]
) -> int:
    """Refuse what cannot be replayed; return the number of steps that the run was asked for."""
    if not (run / update_log.FOLDER).is_dir():
        raise UsageError(f"--replay `{run}` was not recorded: it has no gradients in `{update_log.FOLDER}`")
    last = _last_step(run)
    if not 1 <= step <= last:
        raise UsageError(f"--step is {step}, and `{run}` has the steps 1 to {last}")
    updates = recorded[0]
    if not any(item.step == step for item in updates):
        raise UsageError(f"--step is {step}, in which `{run}` took no optimizer step: no token was in the loss")
    for item in updates:
        if item.mesh != config.mesh.label():
            raise UsageError(
                f"step {item.step} of `{run}` was trained on the mesh {item.mesh}, and the config has "
                f"{config.mesh.label()}: gradients are equal bit by bit on one mesh only, give that one"
            )
        if item.steps != updates[-1].steps and config.optimizer.schedule != "constant":
            raise UsageError(
                f"step {item.step} of `{run}` was trained with steps={item.steps} and step {step} with "
                f"steps={updates[-1].steps}, so their {config.optimizer.schedule} schedules differ, and there is no "
                "checkpoint between the two to begin with"
            )
    for rank, others in enumerate(recorded):
        if [item.number for item in others] != [item.number for item in updates]:
            raise UsageError(
                f"`{update_log.file_of(run, rank)}` has not all updates of the steps {begun_at + 1} to {step}: "
                "the run cannot be replayed"
            )
    for item in updates:
        if not any(RunFolder(run).batch_files(item.step, item.batch)):
            raise UsageError(
                f"the batch `{run / 'batches' / item.batch}` of step {item.step} is gone, and a replay from step "
                f"{begun_at} needs it"
            )
    return updates[-1].steps


def _last_step(run: Path) -> int:
    """Last step that the run has ended, with or without an update."""
    rows = read_rows(run / "metrics.jsonl", dict[str, Any])
    return rows[-1]["step"] if rows else 0


def _first_difference(
    recorded: Sequence[Sequence[RankUpdate]], replayed: Sequence[Sequence[RankUpdate]]
) -> GradientDifference | None:
    """Compare the updates of all ranks: of the first that differs anywhere, the first tensor of the first rank."""
    for at, whole in enumerate(recorded[0]):
        bad = [
            (rank, name)
            for rank, (before, now) in enumerate(zip(recorded, replayed, strict=True))
            for name in sorted(before[at].gradients.keys() | now[at].gradients.keys())
            if before[at].gradients.get(name) != now[at].gradients.get(name)
        ]
        if bad:
            again, (rank, name) = replayed[0][at], bad[0]
            return GradientDifference(
                step=whole.step, rank=rank, number=whole.number, name=name, count=len(bad),
                losses=(whole.loss, again.loss), grad_norms=(whole.grad_norm, again.grad_norm),
            )  # fmt: skip
    return None
