"""Steps of the lines of metrics.jsonl, read back from the file as it grows."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

from verifier.core.records_policy import Runs


def add_step(runs: list[tuple[int, int]], step: int) -> None:
    """Put a step behind runs of steps that count by one."""
    if runs and runs[-1][1] + 1 == step:
        runs[-1] = runs[-1][0], step
    else:
        runs.append((step, step))


class MetricLines:
    """The lines of a file of metrics, each of which is parsed once, unless what was read is no longer there."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._begin()

    def _begin(self) -> None:
        self._at, self._last, self._runs = 0, b"", list[tuple[int, int]]()

    def runs(self) -> Runs:
        """First and last step of each run of lines whose steps count by one, in order; empty without a line.

        A line that cannot be read is none.
        """
        if not self._file.exists():
            self._begin()
            return ()
        with self._file.open("rb") as stream:
            stream.seek(self._at - len(self._last))
            if stream.read(len(self._last)) != self._last:
                self._begin()
            stream.seek(self._at)
            for line in stream:
                if not line.endswith(b"\n"):
                    break
                self._at, self._last = self._at + len(line), line
                with contextlib.suppress(ValueError, KeyError, TypeError):
                    add_step(self._runs, int(json.loads(line)["step"]))
        return tuple(self._runs)
