"""Evidence of a run's checkpoints: what was written, read back, and where a run goes on from one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from verifier.config.training import TrainConfig
from verifier.core.record import Probe
from verifier.core.records_run import WrittenState
from verifier.core.records_trainer import CheckpointNumber, LoadedState, SavedState, WrittenTensors
from verifier.trainer.ahead import AheadRollouts
from verifier.trainer.checkpoint_folder import STATE, RunState, digest_of_values
from verifier.trainer.observer import Observer
from verifier.trainer.run_data import RunData


class CheckpointEvidence(Observer):
    """Checkpoints of a run that no trace has yet.

    Args:
        config: of the run.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config, self._folder = config, config.run / "checkpoints"
        self._data: RunData | None = None
        self._ahead: AheadRollouts | None = None
        self._unjudged: RunState | None = None
        self._writing: int | None = None
        """Step of the checkpoint that is being written."""
        self._stored: list[tuple[int, Sequence[Any]]] = []
        """Step of each checkpoint that was written and not yet recorded, and what each rank read back of it."""
        self._unread: list[int] = []
        """Steps of those that were recorded, whose state nobody has read back yet."""
        self._after: dict[int, str] = {}
        """Digest of the batch that came after each that is being written still."""

    def begin(self, ahead: AheadRollouts | None, data: RunData | None) -> None:
        """Take the sampler of batches that checkpoints keep, and the examples to train on."""
        self._ahead, self._data = ahead, data

    def on_resume(self, state: RunState) -> None:
        """Keep where the run goes on."""
        self._unjudged = state

    def on_save(self, step: int) -> None:
        """Know that a checkpoint is being written."""
        self._writing = step

    def on_checkpoint(self, step: int, found: Sequence[Any]) -> None:
        """Keep what was read back."""
        self._stored.append((step, found))
        self._writing = None

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
        taken = None if self._ahead is None or not at.rollouts else self._ahead.taken
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
            file, after = self._folder / f"{step:06d}" / STATE, self._after.pop(step, None)
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
            self._after.setdefault(self._writing, self._batch_after())

    def _batch_after(self, *, ended: bool = False) -> str:
        """Digest of the batch that was sampled ahead and is taken now, or has not been at the end."""
        if self._ahead is None:
            return digest_of_values([])
        taken = self._ahead.taken
        return digest_of_values(self._ahead.saved() if ended or taken is None else taken.saved())

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
