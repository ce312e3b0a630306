"""Sync of an adapter to the engine that samples, on one rank: export, file, load."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verifier.engine.client import EngineClient, EngineGone
from verifier.errors import ContractError
from verifier.launch.flight_recorder import label
from verifier.trainer.adapters_megatron import Adapters
from verifier.trainer.observer import Note, RankObserver, Transfer

if TYPE_CHECKING:
    from verifier.config import EngineOptions
    from verifier.engine.sender import Running


class AdapterSync:
    """Link of one rank to an engine that keeps the base, and is given an adapter with each version.

    Args:
        adapters: of the trainer.
        rank: this one; rank 0 talks to the engine.
        folder: for the adapters of versions, the same for all ranks.
        observer: told of engines and transfers.

    Attributes:
        lost: why the engine's process is gone; empty if it is not.
    """

    facts: Mapping[str, float] = {}
    """Metrics of the last sync; none."""

    def __init__(self, adapters: Adapters, rank: int, folder: Path, observer: RankObserver) -> None:
        self._adapters, self._rank, self._folder, self._observer = adapters, rank, folder, observer
        self._client: EngineClient | None = None
        self.lost = ""

    def connect(self, sockets: Sequence[str], options: EngineOptions, transport: str, deadline_s: float) -> None:
        """Connect to the engine; an adapter travels as a file, by no transport."""
        self.lost = ""
        if self._rank:
            self._observer.on_connect(None, sleeps=bool(options.sleep_level))
            return
        if self._client is not None:
            self._client.close()
        try:
            self._client = EngineClient(sockets[0], deadline_s=deadline_s)
            self._observer.on_connect(self._client, sleeps=bool(options.sleep_level))
        except EngineGone as problem:
            self.lost = str(problem)

    def sync(
        self, version: int, note: Note | None, running: Running = "none", *, again: bool = False, first: bool = False
    ) -> str:
        """Have the engine sample with the adapter of a version from now on. A collective.

        Args:
            version: of the weights; the engine's adapter is named by it.
            note: for the observer.
            running: requests of the engine meanwhile, which keep their adapter; none.
            again: the engine died in this sync before.
            first: this adapter samples the step of the note, and was not made by it.

        Returns:
            On rank 0, why the engine refused it; empty if it did not, or died: see `lost`.
        """
        client, path, refused = self._client, self._folder / f"version-{version:06d}", ""
        transfer = Transfer(version=version, note=note, client=client, num_ranks=1, again=again, first=first)
        watch = self._observer.on_transfer(transfer)
        with label("export of the adapter"):
            watch.on_adapter(path, self._adapters.save(path))
        try:
            with watch:
                if client is not None:
                    refused = _loaded(client, path)
                watch.on_sent(refused)
        except EngineGone as problem:
            self.lost = str(problem)
            watch.on_lost()
            return ""
        for other in self._folder.glob("version-*") if client is not None else ():
            if other != path:
                shutil.rmtree(other)
        return refused


def _loaded(client: EngineClient, path: Path) -> str:
    """Have an engine load an adapter; return why it refused it, empty if it did not."""
    try:
        client.load_adapter(path)
    except ContractError as problem:
        return str(problem)
    return ""
