"""Evidence of a rank's checkpoints: what it held at a save, how far it had trained, what it holds after a load."""

from __future__ import annotations

from pathlib import Path

import msgspec

from verifier.core.record import Count, Probe
from verifier.core.records_trainer import LoadedState, SavedState, TrainedUntil
from verifier.errors import UsageError
from verifier.trainer.state_megatron import Facts, read_facts, record_facts, write_facts


class Reached(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Point of the run at which a rank began a save, by its own count."""

    step: Count
    optimizer_steps: Count


class Saves:
    """Files of one rank in the folder `saved` of each checkpoint.

    Args:
        rank: this rank.
        coordinate: of the rank in the mesh.

    Attributes:
        trained: last step in which the rank took an update; 0 before the first, and where that is not known.
    """

    def __init__(self, rank: int, coordinate: str) -> None:
        self._rank, self._coordinate, self.trained = rank, coordinate, 0
        self._loaded: tuple[int, Facts, Facts, Reached] | None = None

    def write(self, folder: Path, held: Facts, optimizer_steps: int) -> None:
        """Write what the rank holds, and how far it has trained, into a checkpoint."""
        state, reached = self._files(folder)
        write_facts(state, held)
        reached.write_bytes(msgspec.json.encode(Reached(step=self.trained, optimizer_steps=optimizer_steps)))

    def read(self, folder: Path, held: Facts) -> None:
        """Read what was written, beside what the rank holds after it has loaded the checkpoint.

        Raises:
            UsageError: the checkpoint was written before ranks noted how far they had trained.
        """
        state, file = self._files(folder)
        if not file.exists():
            raise UsageError(
                f"the checkpoint `{folder}` is of an older version, without `saved/{file.name}`: leave --verify out"
            )
        reached = msgspec.json.decode(file.read_bytes(), type=Reached)
        self.trained = reached.step
        self._loaded = (int(folder.name), read_facts(state), held, reached)

    def record(self, probe: Probe) -> None:
        """Record, with the first step after a resume, what was saved and what was loaded."""
        if self._loaded is None:
            return
        version, saved, loaded, reached = self._loaded
        self._loaded = None
        record_facts(probe, SavedState, saved, version)
        record_facts(probe, LoadedState, loaded, version)
        probe.emit(
            TrainedUntil(
                name="saved", version=version, coordinate=self._coordinate, step=reached.step,
                optimizer_steps=reached.optimizer_steps,
            )
        )  # fmt: skip

    def _files(self, folder: Path) -> tuple[Path, Path]:
        own = folder / "saved" / f"{self._rank:04d}.json"
        return own, own.with_suffix(".reached.json")
