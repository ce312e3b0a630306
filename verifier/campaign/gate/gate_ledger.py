"""The ledger of a gate: a line of JSON for each cell that has ended, on the disk before the next one begins.

ledger.jsonl           identity of each finished cell, and its result
gate.yaml              every knob, as `--config` takes it again
traces/                trace of each cell
logs/                  what the workers printed
result.json            the gate's result, once it has ended
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from verifier.campaign.ledger import append_line, decode_line, read_lines
from verifier.core.outputs import locked_folder
from verifier.errors import UsageError
from verifier.report.gate_result import Cell, CellResult

LEDGER, CONFIG = "ledger.jsonl", "gate.yaml"


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished cell."""

    identity: str
    """Digest of the cell, the code, the versions, the machine's kind and the model's files; see `identity_of`."""
    result: CellResult


def identity_of(cell: Cell, machine: Mapping[str, object]) -> str:
    """Digest of all that a cell's result depends on.

    Args:
        cell: of the matrix.
        machine: JSON values: digest of the code, versions, tier, GPUs.
    """
    known = {"cell": msgspec.to_builtins(cell), "machine": dict(machine), "files": _files_of(cell.model)}
    return hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=16).hexdigest()


def _files_of(model: str) -> list[tuple[str, int, int]]:
    """Name, bytes and time of each file of a local checkpoint; none of a generated one, which the code makes."""
    folder = Path(model)
    if not folder.is_dir():
        return []
    files = sorted(path for path in folder.iterdir() if path.is_file())
    return [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]


@dataclass(frozen=True, slots=True)
class GateLedger:
    """Rows of a folder, open for this process alone."""

    file: Path
    rows: dict[str, CellResult]
    """Identity of a finished cell -> how it ended."""

    @property
    def done(self) -> set[str]:
        """Identities of the cells that need not run again."""
        return {identity for identity, result in self.rows.items() if result.status not in ("failed", "not run")}

    def add(self, identity: str, result: CellResult) -> None:
        """Append a row; it is on the disk when this returns. It says of a cell that failed before that it did.

        Raises:
            UsageError: the disk is full, or the file cannot be written.
        """
        earlier = self.rows.get(identity)
        if earlier is not None and earlier.status == "failed":
            result = replace(result, failed_before=(*earlier.failed_before, earlier.reason.partition("\n")[0]))
        append_line(self.file, LedgerRow(identity=identity, result=result))
        self.rows[identity] = result


@contextmanager
def opened_ledger(folder: Path) -> Iterator[GateLedger]:
    """Open the ledger in a gate's folder, new or to be continued, and keep others out of it until exit.

    A last line that was cut, since its process was killed, is dropped.

    Raises:
        UsageError: the folder holds something else, is in use, or cannot be written.
    """
    if folder.is_dir() and any(folder.iterdir()) and not (folder / "gate.lock").exists():
        raise UsageError(f"the folder `{folder}` is no folder of a gate and not empty: choose another --folder")
    with locked_folder(folder, "gate.lock", "folder", "gate"):
        file = folder / LEDGER
        lines = enumerate(read_lines(file), start=1)
        rows = [decode_line(file, number, line, LedgerRow, "gate") for number, line in lines]
        yield GateLedger(file, {row.identity: row.result for row in rows})
