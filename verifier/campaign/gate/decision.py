"""Waivers and the decision: a pure function of the cells, the waivers and the day.

FAIL: a violation that is not waived, a cell whose run died or hung, or a fault that was not caught, since the checks do
not see what they have to see then. INCONCLUSIVE: nothing of that, and a cell that was not run or not judged whole, or a
model of which the matrix leaves out every run. PASS: neither. What else it leaves out decides nothing; the report says
it.

The ledger of a gate: a line of JSON for each cell that has ended, on the disk before the next one begins.

ledger.jsonl           identity of each finished cell, and its result
gate.yaml              every knob, as `--config` takes it again
traces/                trace of each cell
logs/                  what the workers printed
result.json            the gate's result, once it has ended
"""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from verifier.config import Waiver
from verifier.core.check import REGISTRY
from verifier.core.finding import ExitCode
from verifier.core.ledger import append_line, decode_line, read_lines
from verifier.core.outputs import locked_folder
from verifier.errors import UsageError
from verifier.model.families import FAMILIES
from verifier.report.gate_result import Cell, CellResult, Decision, GateFinding, WaiverUse

EXIT_CODES: dict[Decision, ExitCode] = {
    "PASS": ExitCode.HOLDS, "FAIL": ExitCode.VIOLATED, "INCONCLUSIVE": ExitCode.INCONCLUSIVE,
}  # fmt: skip


def require_known_waivers(waivers: Sequence[Waiver], families: Collection[str]) -> None:
    """Refuse a waiver of an unknown check, or of a family of neither table nor gate; the registry is filled by then.

    Raises:
        UsageError: names the waiver.
    """
    known = sorted({row.name for row in FAMILIES.values()} | set(families))
    for item in waivers:
        if item.check not in REGISTRY:
            raise UsageError(f"a waiver names check `{item.check}`, which there is not: `verifier explain` lists them")
        if item.family and item.family not in known:
            raise UsageError(
                f"the waiver of {item.check} names family `{item.family}`, it must be one of {', '.join(known)}"
            )


def waived(
    cells: Sequence[CellResult], waivers: Sequence[Waiver], today: datetime.date
) -> tuple[list[CellResult], list[WaiverUse]]:
    """Mark the violations that waivers cover; return the cells and what came of each waiver.

    An expired waiver marks nothing. Findings of injected faults are never waived.
    """
    counts, late = [0] * len(waivers), [0] * len(waivers)
    found = []
    for result in cells:
        findings = []
        for finding in result.findings:
            index = _waiver_of(finding, result.cell, waivers, today)
            if index is not None and waivers[index].expired(today):
                late[index] += 1
                index = None
            elif index is not None:
                counts[index] += 1
            findings.append(replace(finding, waived_by=index))
        violated = [item for item in findings if item.violated]
        whole = len(violated) == len(findings) and bool(violated)
        covered = result.status == "violated" and whole and all(item.waived_by is not None for item in violated)
        found.append(replace(result, findings=tuple(findings), waived=covered))
    uses = [
        WaiverUse(**asdict(item), expired=item.expired(today), num_waived=counts[place], num_expired=late[place])
        for place, item in enumerate(waivers)
    ]
    return found, uses


def _waiver_of(finding: GateFinding, cell: Cell, waivers: Sequence[Waiver], today: datetime.date) -> int | None:
    if not finding.violated or cell.kind == "faults":
        return None
    covering = [
        (item.expired(today), place)
        for place, item in enumerate(waivers)
        if item.check == finding.check and (item.model == cell.model if item.model else item.family == cell.family)
    ]
    return min(covering)[1] if covering else None


def decided(
    cells: Sequence[CellResult], uses: Sequence[WaiverUse], models: Collection[str] = ()
) -> tuple[Decision, list[str], str]:
    """Return the decision on these models, its reasons, and the first bad stage of violations that are not waived."""
    reasons, doubts = [], []
    for result in cells:
        name, bad = result.cell.id, result.unwaived
        if result.status == "failed":
            reasons.append(f"{name} failed: {_first_line(result.reason)}")
        elif result.status == "violated" and result.cell.kind == "faults":
            reasons.append(f"{name} was not caught, so the checks are not alive here: {_first_line(result.reason)}")
        elif bad:
            more = f", and {len(bad) - 1} more" if len(bad) > 1 else ""
            worst = min(bad, key=lambda item: item.place)
            reasons.append(f"{name} is violated, first in {worst.stage}: {worst.sentence}{more}")
        elif result.status == "violated" and not result.waived:
            doubts.append(f"{name} was not judged whole beside its waived violations")
        elif result.status == "inconclusive":
            doubts.append(f"{name} is inconclusive: {_first_line(result.reason)}")
        elif result.status == "not run":
            doubts.append(f"{name} was not run: {_first_line(result.reason)}")
    own = {result.cell.model for result in cells if result.cell.kind != "faults"}
    doubts += [f"the matrix has no run of {model}: see what is left out" for model in models if model not in own]
    if not cells and not doubts:
        doubts.append("no cell was run")
    expired = [
        f"the waiver of {item.check} expired on {item.until} and waives nothing" for item in uses if item.num_expired
    ]
    bad = [item for result in cells if result.cell.kind != "faults" for item in result.unwaived if item.stage]
    first = min(bad, key=lambda item: item.place, default=None)
    stage = first.stage if first is not None else ""
    if reasons:
        return "FAIL", [*reasons, *expired, *doubts], stage
    return ("INCONCLUSIVE", doubts, stage) if doubts else ("PASS", [], stage)


def _first_line(text: str) -> str:
    return (text.splitlines() or ["no reason is known"])[0]


LEDGER = "ledger.jsonl"


class LedgerRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A finished cell."""

    identity: str
    """Digest of the cell, the code, the versions, the machine's kind and the model's files; see `identity_of`."""
    result: CellResult


def identity_of(cell: Cell, machine: Mapping[str, object]) -> str:
    """Digest of all that a cell's result depends on; `machine` is JSON: digest of the code, versions, tier, GPUs.

    A local checkpoint counts by name, bytes and time of its files; a generated one is made by the code.
    """
    folder = Path(cell.model)
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    stamps = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    known = {"cell": msgspec.to_builtins(cell), "machine": dict(machine), "files": stamps}
    return hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=16).hexdigest()


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
