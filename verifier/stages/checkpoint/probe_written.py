"""Evidence of a run's checkpoints: what was read back of those that were written."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from verifier.core.record import Probe
from verifier.stages.checkpoint.records import WrittenTensors
from verifier.trainer.observer import Observer


class CheckpointEvidence(Observer):
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
            bits = {key: [item[key] for item in tensors] for key in ("given", "written")}
            probe.emit(
                WrittenTensors(
                    name=f"rank {rank}", version=step, tensors=tuple(item["name"] for item in tensors),
                    counts=tuple(map(len, bits["given"])), found=tuple(map(len, bits["written"])),
                ),
                {key: np.array([bit for part in parts for bit in part], np.int64) for key, parts in bits.items()},
            )  # fmt: skip
        return bool(read)
