"""Events of TensorBoard, read back from their file: what a curve there shows, by a reader of its own."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path

from verifier.core.records_policy import Runs
from verifier.trainer.metric_lines import add_step

HEADER = struct.Struct("<QI")
"""Bytes of a record and the checksum of that number, before the record; another checksum of four bytes is behind it."""
CHECKSUM_BYTES = 4


class EventFile:
    """The newest file of events in a folder, which goes on growing.

    Attributes:
        restart: step from which on it takes the place of earlier files; -1 where no event has said so yet.
    """

    def __init__(self, folder: Path) -> None:
        self._file = max(folder.glob("events.out.tfevents.*"), key=lambda file: file.stat().st_mtime_ns)
        self._at, self._last = 0, (-1, dict[str, float]())
        self._runs = list[tuple[int, int]]()
        self.restart = -1

    def last(self) -> tuple[int, dict[str, float]]:
        """Step of the last event with numbers, and its numbers by tag; -1 and none where there is none."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog

        with self._file.open("rb") as stream:
            stream.seek(self._at)
            data = stream.read()
        for record in self._records(data):
            event = Event.FromString(record)
            if event.HasField("session_log") and event.session_log.status == SessionLog.START and not self._runs:
                self.restart = event.step
            if event.HasField("summary"):
                add_step(self._runs, event.step)
                self._last = event.step, {item.tag: item.simple_value for item in event.summary.value}
        return self._last

    @property
    def runs(self) -> Runs:
        """First and last step of each run of events whose steps count by one, of those that were read."""
        return tuple(self._runs)

    def _records(self, data: bytes) -> Iterator[bytes]:
        """Whole records, in order; what is left is read again."""
        at = 0
        while at + HEADER.size <= len(data):
            begin = at + HEADER.size
            end = begin + HEADER.unpack_from(data, at)[0]
            if end + CHECKSUM_BYTES > len(data):
                break
            yield data[begin:end]
            at = end + CHECKSUM_BYTES
        self._at += at
