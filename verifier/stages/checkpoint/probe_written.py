"""Evidence of a run's checkpoints: what was read back of those that were written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from verifier.core.record import Probe
from verifier.stages.checkpoint.records import WrittenTensors


class CheckpointEvidence:
    """Checkpoints of a run that no trace has yet."""

    def __init__(self) -> None:
        self._unjudged = False
        self._stored: list[tuple[int, Sequence[Any]]] = []
        """Step of each checkpoint that was written and not yet recorded, and what each rank read back of it."""

    def on_resume(self, step: int) -> None:
        """Know that the ranks have loaded one."""
        self._unjudged = True

    def on_checkpoint(self, step: int, found: Sequence[Any]) -> None:
        """Keep what was read back."""
        self._stored.append((step, found))

    def begins_judged(self) -> bool:
        """Tell once, of the first step after a load, that it is that step."""
        first, self._unjudged = self._unjudged, False
        return first

    def record_stored(self, probe: Probe) -> bool:
        """Record what was read back of the checkpoints since the last record; tells whether there is any."""
        stored, self._stored = self._stored, []
        read = [(step, rank, tensors) for step, ranks in stored for rank, tensors in enumerate(ranks) if any(ranks)]
        for step, rank, tensors in read:
            record_written(probe, f"rank {rank}", step, tensors)
        return bool(read)


def record_written(probe: Probe, name: str, version: int, tensors: Sequence[Mapping[str, Any]]) -> None:
    """Record tensors by "name", with the bits that were "given" to be written and those "written"; none if absent."""
    bits = {key: [item[key] for item in tensors] for key in ("given", "written")}
    record = WrittenTensors(
        name=name, version=version, tensors=tuple(item["name"] for item in tensors),
        counts=tuple(map(len, bits["given"])), found=tuple(map(len, bits["written"])),
    )  # fmt: skip
    probe.emit(
        record, {key: np.array([bit for part in parts for bit in part], np.int64) for key, parts in bits.items()}
    )
