"""Evidence of engines in the trace of a step: as they started and served, cut off where one died, taken by itself."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verifier.core.record import Probe
from verifier.core.store import Recorder
from verifier.engine.api import EngineSlice, EngineTensor
from verifier.engine.client import EngineClient
from verifier.stages.engine.probe_engine_state import EngineState, held_by, record_views
from verifier.stages.engine.records import ColdSettings, ColdTensor, EngineServed, HeldTwice

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


class HeldEngine:
    """Contents of engines: as they started, after each sync, and before the next.

    Args:
        client: of engines that were sent nothing yet.
        sleeps: they sleep between syncs, and are asked right after each alone.
    """

    def __init__(self, client: EngineClient, *, sleeps: bool) -> None:
        self._client = client
        self._cold = self._held = None if sleeps else held_by(client)
        self._version: int | None = None

    def record_served(self, probes: Sequence[Probe], version: int) -> None:
        """Record how they differ from what they held after the last sync.

        Args:
            probes: by engine rank.
            version: by which they answered, if they were sent nothing yet.
        """
        if self._held is None:
            return
        found = held_by(self._client)
        number = version if self._version is None else self._version
        for probe, before, after in zip(probes, self._held.tensors, found.tensors, strict=True):
            changed = tuple(_changed(before, after))
            name = "the engine between two syncs"
            probe.emit(EngineServed(name=name, version=number, num_tensors=len(after), changed=changed))

    def synced(self, version: int, probes: Sequence[Probe] = ()) -> None:
        """Look at what they hold after a sync.

        Args:
            version: that was sent.
            probes: by engine rank, which record it, beside settings and buffers of their start; none for no evidence.
        """
        found, self._version = held_by(self._client), version
        if probes:
            found.record(probes, version)
        if self._cold is None:
            return
        self._held = found
        if probes:
            buffers = [[item for item in rank if item.kind == "buffer"] for rank in self._cold.tensors]
            EngineState(tensors=buffers, settings=self._cold.settings).record(probes, version, ColdTensor, ColdSettings)


def _changed(before: Sequence[EngineTensor], after: Sequence[EngineTensor]) -> Iterator[HeldTwice]:
    was, now = ({item.name: item.digest for item in side} for side in (before, after))
    for name in was | now:
        if was.get(name) != now.get(name):
            yield HeldTwice(name=name, synced=was.get(name, ""), served=now.get(name, ""))


def record_held(
    trace: Path, views: Sequence[Sequence[EngineSlice]], sent: Mapping[str, torch.Tensor], version: int
) -> None:
    """Record what each engine rank holds, beside what it should hold as a version, whole and by name."""
    for rank, slices in enumerate(views):
        with contextlib.closing(Recorder(trace, "engine", rank)) as probe:
            record_views(probe, slices, sent, version)
