"""Rows of a sweep: one per trial, appended and flushed to the disk as it ends, and read again to continue.

sweep.lock      who has the folder open
trials.jsonl    first what the sweep is of, then a line a trial
trials/         logs of the ranks of the last trial
config.json     of the model
sweep.json      summary
sweep.html      plot
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from verifier.campaign.ledger import append_line, decode_line, read_lines
from verifier.config.sweep import SweepConfig
from verifier.core.outputs import locked_folder
from verifier.errors import UsageError
from verifier.knob import flat

Status = Literal["ok", "out_of_memory", "failed"]
FREE = ("ranks", "meshes", "recompute", "least_tokens", "most_tokens", "timeout_s", "trial_timeout_s", "run")
"""Knobs in which a sweep may be continued with another value: its rows are the same under all of them."""


class SweepRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One trial: a layout and a budget, and how its steps went."""

    layout: str
    """`SweptLayout.name`."""
    mesh: dict[str, int | None]
    recompute: str
    max_tokens: int
    """Budget of a micro-batch, tokens."""
    status: Status
    step_s: float | None = None
    """Median of the timed steps, seconds."""
    tokens_per_s: float | None = None
    """Tokens of all ranks a second, without padding."""
    peak_bytes: int | None = None
    """Highest peak of all ranks; of the ranks that could still say it where memory ran out. See `MemoryPeaks`."""
    reserved_bytes: int | None = None
    reason: str = ""
    """Why it did not run."""
    trial_s: float = 0.0
    """Seconds from the fork of the ranks to their end."""


def memory_file(run_dir: Path, rank: int) -> Path:
    """File of a rank's `MemoryPeaks`."""
    return run_dir / f"memory{rank:03d}.json"


@dataclass(frozen=True, slots=True)
class SweepRows:
    """File of a sweep's rows, open for this process alone."""

    file: Path
    rows: list[SweepRow]

    def add(self, row: SweepRow) -> None:
        """Append a row; it is on the disk when this returns.

        Raises:
            UsageError: it cannot be written.
        """
        append_line(self.file, row)
        self.rows.append(row)

    def tried(self, layout: str) -> dict[int, bool]:
        """Return budget -> whether it ran, for the trials of a layout."""
        return {row.max_tokens: row.status == "ok" for row in self.rows if row.layout == layout}


@contextlib.contextmanager
def opened_rows(config: SweepConfig, device: str) -> Iterator[SweepRows]:
    """Open the folder of a sweep, new or to be continued, and keep others out of it until exit.

    A last line that was cut, since its process was killed, is dropped.

    Args:
        config: of the sweep.
        device: what its ranks run on.

    Raises:
        UsageError: the folder holds a sweep of other knobs or of another device, is in use, or cannot be written.
    """
    folder, file = config.run, config.run / "trials.jsonl"
    with locked_folder(folder, "sweep.lock", "folder", "sweep"):
        asked = {"device": device, **_shared_knobs(config)}
        lines = read_lines(file)
        if lines:
            _require_same(folder, lines[0], asked)
        else:
            append_line(file, asked)
        rows = enumerate(lines[1:], start=2)
        yield SweepRows(file, [decode_line(file, number, line, SweepRow, "sweep") for number, line in rows])


def _shared_knobs(config: SweepConfig) -> dict[str, Any]:
    values = {key: value for key, value in flat(config.to_dict()).items() if key not in FREE}
    return {key: values[key] for key in sorted(values)}


def _require_same(folder: Path, line: bytes, asked: Mapping[str, Any]) -> None:
    try:
        found = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError as problem:
        raise UsageError(
            f"`{folder / 'trials.jsonl'}` is no file of a sweep: {problem}; choose another --run"
        ) from None
    for key in sorted(found.keys() | asked.keys()):
        if found.get(key) != asked.get(key):
            raise UsageError(
                f"the folder `{folder}` holds a sweep with {key}={found.get(key)}, and {key}={asked.get(key)} is asked "
                "for: give the same value to continue it, or choose another --run"
            )
