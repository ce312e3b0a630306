"""Evidence of a rank's checkpoints: what it held at a save, and what it holds after a load."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from verifier.core.record import Probe
from verifier.core.records_trainer import LoadedState, SavedState
from verifier.errors import UsageError
from verifier.trainer.state_elements_megatron import Elements, read_elements, record_elements, write_elements
from verifier.trainer.state_megatron import Facts, read_facts, record_facts, write_facts


class Saves:
    """Files of one rank in the folder `saved` of each checkpoint.

    Args:
        rank: this rank.
        coordinate: of the rank in the mesh.

    Attributes:
        trained: last step in which the rank took an update, or that of the checkpoint that it loaded; 0 before either.
    """

    def __init__(self, rank: int, coordinate: str) -> None:
        self._rank, self._coordinate, self.trained = rank, coordinate, 0
        self._loaded: Callable[[Probe], None] | None = None

    def write(self, folder: Path, held: Facts, elements: Elements) -> None:
        """Write what the rank holds into a checkpoint."""
        state = self._file(folder, self._rank)
        write_facts(state, held)
        write_elements(state.with_suffix(".elements.json"), elements)

    def read(self, folder: Path, held: Facts, elements: Elements, *, same_mesh: bool) -> None:
        """Read what was written, beside what the rank holds after it has loaded the checkpoint.

        Of another mesh some elements are read, of all ranks, since no rank there held what this one does.

        Raises:
            UsageError: the checkpoint was written before ranks noted what they held.
        """
        others = sorted((folder / "saved").glob("*.elements.json"))
        rank = self._rank if same_mesh else self._rank % max(len(others), 1)
        state = self._file(folder, rank)
        wanted = state if same_mesh else state.with_suffix(".elements.json")
        if not wanted.exists():
            raise UsageError(
                f"the checkpoint `{folder}` is of an older version, without `saved/{wanted.name}`: leave --verify out"
            )
        self.trained = int(folder.name)
        saved: Any = read_facts(state) if same_mesh else read_elements(others)

        def record(probe: Probe) -> None:
            version = int(folder.name)
            if same_mesh:
                record_facts(probe, SavedState, saved, version)
                record_facts(probe, LoadedState, held, version)
            else:
                record_elements(probe, saved, elements, version, self._coordinate)

        self._loaded = record

    def record(self, probe: Probe) -> None:
        """Record, with the first step after a resume, what was saved and what was loaded."""
        if self._loaded is not None:
            self._loaded(probe)
            self._loaded = None

    @staticmethod
    def _file(folder: Path, rank: int) -> Path:
        return folder / "saved" / f"{rank:04d}.json"
