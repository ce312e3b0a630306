"""Records that are made before there is a trace for them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from verifier.core.record import Probe, Record


class Kept:
    """A probe that keeps what it is given, to be written to one or several traces."""

    def __init__(self) -> None:
        self._records: list[tuple[Record, Any]] = []

    def emit(self, record: Record, array: Any = None) -> None:
        """Keep a record with its arrays."""
        self._records.append((record, array))

    def record(self, probe: Probe, **changed: Any) -> None:
        """Write them to a trace, with other values of some fields."""
        for item, array in self._records:
            probe.emit(replace(item, **changed), array)

    def hand_over(self, probe: Probe) -> None:
        """Write them to a trace and forget them."""
        self.record(probe)
        self._records.clear()
