"""Evidence of engines in the trace of a step: cut off where one died within it, and taken by itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verifier.core.store import Recorder
from verifier.engine.api import EngineSlice
from verifier.probes.engine_state import record_views

if TYPE_CHECKING:
    import torch


class EvidenceBefore:
    """Length of what a trace has of engines before an attempt, which may fail and is then made again.

    Args:
        trace: trace directory; None for none.
        ranks: number of engine ranks.
    """

    def __init__(self, trace: str | None, ranks: int) -> None:
        folder = None if trace is None else Path(trace) / "evidence"
        files = [] if folder is None else [folder / f"engine-{rank:04d}.jsonl" for rank in range(ranks)]
        self._sizes = {file: file.stat().st_size if file.exists() else 0 for file in files}

    def restore(self) -> None:
        """Remove what was recorded since, once its recorders are closed."""
        for file, size in self._sizes.items():
            if not size:
                file.unlink(missing_ok=True)
            elif file.exists():
                os.truncate(file, size)


def record_held(
    trace: Path, views: Sequence[Sequence[EngineSlice]], sent: Mapping[str, torch.Tensor], version: int
) -> None:
    """Record what each engine rank holds, beside what it should hold as a version, whole and by name."""
    for rank, slices in enumerate(views):
        with contextlib.closing(Recorder(trace, "engine", rank)) as probe:
            record_views(probe, slices, sent, version)
