"""Continuation of a run: where it was stopped, what is removed, and the checkpoints that it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from verifier.config.training import TrainConfig
from verifier.errors import UsageError
from verifier.trainer.ahead import AheadRollouts
from verifier.trainer.checkpoint_folder import Checkpoints, RunState, digest_of_values
from verifier.trainer.observer import SILENT, Observer
from verifier.trainer.run_folder import RunFolder, shared_knobs

Call = Callable[..., list[Any]]
"""Calls a method of all ranks by its name and arguments."""


class Continuation:
    """The checkpoints of a run, from the one that it continues to the last that it writes.

    Args:
        config: of the run.
        folder: of the run.
        progress: called with a line of text.
        observer: told of checkpoints.
    """

    def __init__(
        self, config: TrainConfig, folder: RunFolder, progress: Callable[[str], None], observer: Observer = SILENT
    ) -> None:
        self._observer = observer
        self._config, self._folder, self._progress = config, folder, progress
        self._checkpoints = Checkpoints(folder.path / "checkpoints", config.checkpoint.keep)
        self._digest = digest_of_values(shared_knobs(config))
        self._at: RunState | None = None
        self._writing: RunState | None = None

    def rewind(self) -> tuple[int, dict[str, Any]]:
        """Find the last whole checkpoint, and remove all that came after it.

        Returns:
            The number of steps that are done, and the metrics of the last.

        Raises:
            UsageError: the checkpoint is of other knobs, or of a later step than is asked for.
        """
        at, refused = self._checkpoints.last_whole()
        for reason in refused.values():
            self._progress(reason)
        step = 0 if at is None else at.step
        path = self._checkpoints.path(step)
        if at is not None and at.config != self._digest:
            raise UsageError(
                f"the checkpoint `{path}` is of a run with other knobs: remove it, or choose another --run"
            )
        if step > self._config.steps:
            raise UsageError(
                f"`{self._folder.path}` has trained {step} steps, --steps is {self._config.steps}: give more"
            )
        self._checkpoints.remove_after(step)
        metrics = self._folder.rewind(step)
        if at is not None:
            self._progress(f"continuing from the checkpoint `{path}`: {step} steps are done")
        elif (self._folder.path / "config.yaml").exists():
            self._progress("the run has no whole checkpoint: it begins anew")
        self._at = at
        return step, metrics

    @property
    def updates(self) -> int:
        """Optimizer steps that the checkpoint has taken; 0 without one."""
        return 0 if self._at is None else self._at.updates

    def restore(self, ahead: AheadRollouts | None) -> None:
        """Give back the batch that was sampled ahead of the checkpoint, if there is one."""
        if self._at is not None and ahead is not None and self._at.rollouts:
            ahead.restore(self._at.step + 1, self._at.rollouts)

    def load(self, call: Call) -> dict[str, Any]:
        """Have the ranks load the checkpoint, or begin without one; returns rank 0's effective settings."""
        arguments: dict[str, Any] = {}
        if self._at is not None:
            same_mesh = self._at.mesh == self._config.mesh.label()
            arguments = {"resume": str(self._checkpoints.path(self._at.step)), "same_mesh": same_mesh}
            self._observer.on_resume(self._at.step)
        settings: dict[str, Any] = call("load", **arguments)[0]
        return settings

    def is_due(self, step: int) -> bool:
        """Tell whether a checkpoint is to be written after a step."""
        every = self._config.checkpoint.every
        return every > 0 and step % every == 0

    def begin(self, call: Call, step: int, updates: int, rollouts: Sequence[Any] = ()) -> None:
        """Have the ranks begin a checkpoint of a step, its updates and what was sampled ahead, unless there is one."""
        self.finish(call, wait=True)
        if self._checkpoints.path(step).exists():
            return
        call("save", folder=str(self._checkpoints.begin(step)))
        self._writing = RunState(
            step=step, updates=updates, data_position=step, weight_version=step, seed=self._config.seed,
            config=self._digest, mesh=self._config.mesh.label(), rollouts=list(rollouts),
        )  # fmt: skip

    def finish(self, call: Call, *, wait: bool) -> None:
        """Declare whole the checkpoint that was begun, once the ranks have written it; waits for that if asked to."""
        if self._writing is None:
            return
        folder = self._checkpoints.partial(self._writing.step)
        found = call("saved", folder=str(folder), wait=wait)
        if all(item is not None for item in found):
            self._checkpoints.finish(self._writing)
            self._observer.on_checkpoint(self._writing.step, found)
            self._writing = None
