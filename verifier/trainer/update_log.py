"""Updates as each rank reports them, a line of JSON each: `ranks/0000.jsonl` in the folder of a run.

A replay takes the same updates from the lines, and compares the digests of their gradients.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from verifier.core.ledger import append_rows, lines_of, read_rows
from verifier.core.outputs import write_whole

FOLDER = "ranks"


class RankUpdate(msgspec.Struct, frozen=True, kw_only=True):
    """One optimizer step on one rank; `step`, `number` and `first` as `OptimizerUpdate` has them."""

    step: int
    number: int
    batch: str
    first: bool
    mesh: str
    steps: int
    """Steps that the run was asked for; schedules of rates end there."""
    loss: float
    grad_norm: float
    peak_memory: int
    """Most memory that the rank has held since it started, bytes: of the GPU, or of the process without one."""
    gradients: dict[str, str]
    """Parameter -> digest of the part of its reduced gradient that this rank owns."""


def file_of(run: Path, rank: int) -> Path:
    """File of a rank."""
    return run / FOLDER / f"{rank:04d}.jsonl"


def append(run: Path, rank: int, update: RankUpdate) -> None:
    """Append the line of an update."""
    file = file_of(run, rank)
    file.parent.mkdir(exist_ok=True)
    append_rows(file, [update])


def read(run: Path, rank: int) -> list[RankUpdate]:
    """Return the updates of a rank, in order; a line that was cut is left out, and a rank without a file has none."""
    return read_rows(file_of(run, rank), RankUpdate)


def rewind(run: Path, step: int) -> None:
    """Remove the updates after a step."""
    for file in sorted((run / FOLDER).glob("*.jsonl")):
        kept = [item for item in read(run, int(file.stem)) if item.step <= step]
        write_whole(file, lines_of(kept))
