"""Sync of an adapter to the engine that samples, on one rank: export, file, load, and its evidence."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from verifier.core.records_weights import Handover
from verifier.core.store import Recorder
from verifier.engine.client import EngineClient, EngineGone
from verifier.errors import ContractError
from verifier.launch.flight_recorder import label
from verifier.model.checkpoint import Checkpoint
from verifier.probes.engine_state import record_views
from verifier.train import lora_megatron
from verifier.trainer.adapters_megatron import Adapters
from verifier.trainer.engine_evidence import EvidenceBefore, HeldEngine, record_held

if TYPE_CHECKING:
    from verifier.config import EngineOptions
    from verifier.engine.sender import Running


class AdapterSync:
    """Link of one rank to an engine that keeps the base, and is given an adapter with each version.

    Args:
        adapters: of the trainer.
        source: checkpoint of the base, which the engine holds.
        rank: this one; rank 0 talks to the engine.
        folder: for the adapters of versions, the same for all ranks.
        judged: syncs are recorded, and so is what the engine holds between them.

    Attributes:
        lost: why the engine's process is gone; empty if it is not.
    """

    facts: Mapping[str, float] = {}
    """Metrics of the last sync; none."""

    def __init__(
        self, adapters: Adapters, source: Checkpoint, rank: int, folder: Path, *, judged: bool = False
    ) -> None:
        self._adapters, self._source, self._rank, self._folder = adapters, source, rank, folder
        self._judged = judged
        self._held: HeldEngine | None = None
        self._client: EngineClient | None = None
        self.lost = ""

    def connect(self, sockets: Sequence[str], options: EngineOptions, transport: str, deadline_s: float) -> None:
        """Connect to the engine; an adapter travels as a file, by no transport."""
        self.lost = ""
        if self._rank == 0:
            if self._client is not None:
                self._client.close()
            try:
                self._client = EngineClient(sockets[0], deadline_s=deadline_s)
                self._held = HeldEngine(self._client, sleeps=bool(options.sleep_level)) if self._judged else None
            except EngineGone as problem:
                self.lost = str(problem)

    def sync(
        self, version: int, trace: str | None, probe: Recorder | None, running: Running = "none", *,
        again: bool = False, first: bool = False,
    ) -> str:  # fmt: skip
        """Have the engine sample with the adapter of a version from now on. A collective.

        Args:
            version: of the weights; the engine's adapter is named by it.
            trace: trace directory; None records nothing.
            probe: this rank's recorder of the trace.
            running: requests of the engine meanwhile, which keep their adapter; none.
            again: the engine died in this sync before, whose export is recorded.
            first: the trace has no shards of these weights.

        Returns:
            On rank 0, why the engine refused it; empty if it did not, or died: see `lost`.
        """
        path = self._folder / f"version-{version:06d}"
        with label("export of the adapter"):
            adapter = self._adapters.save(path, None if again else probe, version)
        if probe is not None and not again and not first:
            self._adapters.record_exported(probe, version)
        if self._client is None:
            return ""
        before = EvidenceBefore(trace, 1)
        try:
            return self._handed(self._client, path, adapter, version, trace, probe, first=first)
        except EngineGone as problem:
            self.lost = str(problem)
        before.restore()
        return ""

    def look(self, version: int, trace: Path) -> None:
        """Record what the engine holds, beside the base and the adapter of a version. A collective."""
        with label("export of the adapter"):
            adapter = self._adapters.export()
        if self._client is None:
            return
        try:
            record_held(trace, self._client.checkpoint_view(), self._wanted(adapter), version)
        except EngineGone as problem:
            self.lost = str(problem)

    def _handed(
        self, client: EngineClient, path: Path, adapter: Mapping[str, torch.Tensor], version: int, trace: str | None,
        probe: Recorder | None, *, first: bool,
    ) -> str:  # fmt: skip
        """Have the engine load an adapter, and record what it holds; see `sync`."""
        refused = ""
        with contextlib.ExitStack() as stack:
            ranks: list[Recorder] = []
            if probe is not None and trace is not None:
                ranks.append(stack.enter_context(contextlib.closing(Recorder(Path(trace), "engine", 0))))
            if self._held is not None and ranks and not first:
                self._held.record_served(ranks, version - 1)
            try:
                client.load_adapter(path)
            except ContractError as problem:
                refused = str(problem)
            if self._held is not None:
                self._held.synced(version, ranks)
            for recorder in ranks:
                for slices in client.checkpoint_view():
                    record_views(recorder, slices, self._wanted(adapter), version)
        if probe is not None and trace is not None:
            probe.emit(Handover(name=f"adapter of version {version}", version=version, refused=refused))
        for other in self._folder.glob("version-*"):
            if other != path:
                shutil.rmtree(other)
        return refused

    def _wanted(self, adapter: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All that the engine has to hold: the base as it was loaded, and the adapter, scaled."""
        base = {name: self._source.read(name) for name in self._source.names()}
        return base | lora_megatron.held_by_engine(adapter, self._adapters.lora.scaling)
