"""Continuation of a run: where it was stopped, what is removed, and the checkpoints that it writes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from verifier.config.training import TrainConfig
from verifier.core.record import Probe
from verifier.core.records_run import WrittenState
from verifier.core.records_trainer import CheckpointNumber, LoadedState, SavedState, WrittenTensors
from verifier.errors import UsageError
from verifier.trainer.ahead import AheadRollouts
from verifier.trainer.checkpoint_folder import STATE, Checkpoints, RunState, digest_of_values
from verifier.trainer.data_as_read import DataAsRead
from verifier.trainer.run_folder import RunFolder, shared_knobs

Call = Callable[..., list[Any]]
"""Calls a method of all ranks by its name and arguments."""


class Continuation:
    """The checkpoints of a run, from the one that it continues to the last that it writes.

    Args:
        config: of the run.
        folder: of the run.
        progress: called with a line of text.
        data: of the run, as they were read; None where they are not compared with those before a stop.
    """

    def __init__(
        self, config: TrainConfig, folder: RunFolder, progress: Callable[[str], None], data: DataAsRead | None = None
    ) -> None:
        self._data = data
        self._config, self._folder, self._progress = config, folder, progress
        self._checkpoints = Checkpoints(folder.path / "checkpoints", config.checkpoint.keep)
        self._digest = digest_of_values(shared_knobs(config))
        self._at: RunState | None = None
        self._unjudged: RunState | None = None
        self._writing: RunState | None = None
        self._ahead: AheadRollouts | None = None
        self._stored: list[tuple[int, list[Any]]] = []
        """Step of each checkpoint that was written and not yet recorded, and what each rank read back of it."""
        self._unread: list[int] = []
        """Steps of those that were recorded, whose state nobody has read back yet."""
        self._after: dict[int, str] = {}
        """Digest of the batch that came after each that is being written still."""
        self._live: AheadRollouts | None = None

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
        self._live = ahead
        if self._at is not None and ahead is not None and self._at.rollouts:
            ahead.restore(self._at.step + 1, self._at.rollouts)
            self._ahead = ahead

    def load(self, call: Call) -> dict[str, Any]:
        """Have the ranks load the checkpoint, or begin without one; returns rank 0's effective settings."""
        arguments: dict[str, Any] = {}
        if self._at is not None:
            same_mesh = self._at.mesh == self._config.mesh.label()
            arguments = {"resume": str(self._checkpoints.path(self._at.step)), "same_mesh": same_mesh}
            self._unjudged = self._at
        settings: dict[str, Any] = call("load", **arguments)[0]
        return settings

    def record(self, probe: Probe | None, step: int) -> bool:
        """Record, in the trace of the first step after a load, where the data go on; tells whether it is that step."""
        at = self._unjudged
        if at is None or probe is None:
            return False
        self._unjudged = None
        probe.emit(
            CheckpointNumber(name="checkpoint", version=at.weight_version, step=at.step, optimizer_steps=at.updates)
        )
        found: list[tuple[type[SavedState | LoadedState], str, Any]] = [
            (SavedState, "position", at.data_position), (LoadedState, "position", step - 1),
        ]  # fmt: skip
        if at.data and self._data is not None:
            found += [(SavedState, "examples", at.data), (LoadedState, "examples", self._data.digest)]
        ahead = self._config.algorithm == "grpo" and self._config.grpo.mode != "sync" and at.step < at.asked
        found += [(SavedState, "rollouts", at.rollouts)] if at.rollouts or ahead else []
        taken = None if self._ahead is None else self._ahead.taken
        found += [(LoadedState, "rollouts", taken.saved())] if taken is not None else []
        for kind, name, value in found:
            probe.emit(
                kind(
                    name=f"data/{name}", version=at.weight_version, coordinate="", dtype="int64", shape=(),
                    digest=digest_of_values(value),
                )
            )  # fmt: skip
        return True

    def record_states(self, probe: Probe | None, *, ended: bool = False) -> None:
        """Record the controller's part of what was written, read back, beside the batch that came after it.

        Args:
            probe: of the trace in which `record_stored` has recorded what the ranks read back.
            ended: no step comes after it; else the batch is the one that the step of the trace has taken.
        """
        unread, self._unread = self._unread, []
        for step in unread if probe is not None else ():
            file, after = self._checkpoints.path(step) / STATE, self._after.pop(step, None)
            if after is None:
                after = self._batch_after(ended=ended)
            if file.exists() and probe is not None:
                found = msgspec.json.decode(file.read_bytes(), type=RunState)
                numbers = {"step": found.step, "data_position": found.data_position, "weights": found.weight_version}
                probe.emit(
                    WrittenState(
                        name="state.json", version=step, numbers=numbers, rollouts=digest_of_values(found.rollouts),
                        after=after,
                    )
                )  # fmt: skip
        if self._writing is not None and not ended:
            self._after.setdefault(self._writing.step, self._batch_after())

    def _batch_after(self, *, ended: bool = False) -> str:
        """Digest of the batch that was sampled ahead and is taken now, or has not been at the end."""
        if self._live is None:
            return digest_of_values([])
        taken = self._live.taken
        return digest_of_values(self._live.saved() if ended or taken is None else taken.saved())

    def record_stored(self, probe: Probe) -> bool:
        """Record what was read back of the checkpoints since the last record; tells whether there is any."""
        stored, self._stored = self._stored, []
        read = [(step, rank, tensors) for step, ranks in stored for rank, tensors in enumerate(ranks) if any(ranks)]
        for step, rank, tensors in read:
            bits = {key: [item[key] for item in tensors] for key in ("given", "written")}
            probe.emit(
                WrittenTensors(
                    name=f"rank {rank}", version=step, tensors=tuple(item["name"] for item in tensors),
                    counts=tuple(map(len, bits["given"])), found=tuple(map(len, bits["written"])),
                ),
                {key: np.array([bit for part in parts for bit in part], np.int64) for key, parts in bits.items()},
            )  # fmt: skip
        self._unread += [step for step, _ in stored if read]
        return bool(read)

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
            config=self._digest, mesh=self._config.mesh.label(), rollouts=list(rollouts), asked=self._config.steps,
            data="" if self._data is None else self._data.digest,
        )  # fmt: skip

    def finish(self, call: Call, *, wait: bool) -> None:
        """Declare whole the checkpoint that was begun, once the ranks have written it; waits for that if asked to."""
        if self._writing is None:
            return
        folder = self._checkpoints.partial(self._writing.step)
        found = call("saved", folder=str(folder), wait=wait)
        if all(item is not None for item in found):
            self._checkpoints.finish(self._writing)
            self._stored.append((self._writing.step, found))
            self._writing = None
