"""Evidence of a rank's checkpoints: what it held at a save, how far it had trained, what it holds after a load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from verifier.core.record import Count, Probe
from verifier.core.records_trainer import LoadedState, SavedState, TrainedUntil
from verifier.errors import UsageError
from verifier.trainer.state_elements_megatron import Elements, read_elements, record_elements, write_elements
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
        self._loaded: Callable[[Probe], None] | None = None

    def write(self, folder: Path, held: Facts, elements: Elements, optimizer_steps: int) -> None:
        """Write what the rank holds, and how far it has trained, into a checkpoint."""
        state, reached = self._files(folder, self._rank)
        write_facts(state, held)
        write_elements(state.with_suffix(".elements.json"), elements)
        reached.write_bytes(msgspec.json.encode(Reached(step=self.trained, optimizer_steps=optimizer_steps)))

    def read(self, folder: Path, held: Facts, elements: Elements, *, same_mesh: bool) -> None:
        """Read what was written, beside what the rank holds after it has loaded the checkpoint.

        Of another mesh some elements are read, of all ranks, since no rank there held what this one does.

        Raises:
            UsageError: the checkpoint was written before ranks noted how far they had trained, or elements.
        """
        others = sorted((folder / "saved").glob("*.elements.json"))
        rank = self._rank if same_mesh else self._rank % max(len(others), 1)
        state, file = self._files(folder, rank)
        for wanted in (file, *(() if same_mesh or others else (state.with_suffix(".elements.json"),))):
            if not wanted.exists():
                raise UsageError(
                    f"the checkpoint `{folder}` is of an older version, without `saved/{wanted.name}`: "
                    "leave --verify out"
                )
        reached = msgspec.json.decode(file.read_bytes(), type=Reached)
        self.trained = reached.step
        saved: Any = read_facts(state) if same_mesh else read_elements(others)

        def record(probe: Probe) -> None:
            version = int(folder.name)
            if same_mesh:
                record_facts(probe, SavedState, saved, version)
                record_facts(probe, LoadedState, held, version)
            else:
                record_elements(probe, saved, elements, version, self._coordinate)
            probe.emit(
                TrainedUntil(
                    name="saved", version=version, coordinate=self._coordinate, step=reached.step,
                    optimizer_steps=reached.optimizer_steps,
                )
            )  # fmt: skip

        self._loaded = record

    def record(self, probe: Probe) -> None:
        """Record, with the first step after a resume, what was saved and what was loaded."""
        if self._loaded is not None:
            self._loaded(probe)
            self._loaded = None

    def _files(self, folder: Path, rank: int) -> tuple[Path, Path]:
        own = folder / "saved" / f"{rank:04d}.json"
        return own, own.with_suffix(".reached.json")
