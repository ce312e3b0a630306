"""Waivers and the decision: a pure function of the cells, the waivers and the day.

FAIL: a violation that is not waived, a cell whose run died or hung, or a fault that was not caught, since the checks do
not see what they have to see then. INCONCLUSIVE: nothing of that, and a cell that was not run or not judged whole.
PASS: neither. What the matrix leaves out decides nothing; the report says it.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Sequence
from dataclasses import asdict

from msgspec.structs import replace

from verifier.config import Waiver
from verifier.core.check import REGISTRY
from verifier.core.finding import ExitCode
from verifier.errors import UsageError
from verifier.model.families import FAMILIES
from verifier.report.gate_result import Cell, CellResult, Decision, GateFinding, WaiverUse

EXIT_CODES: dict[Decision, ExitCode] = {
    "PASS": ExitCode.HOLDS, "FAIL": ExitCode.VIOLATED, "INCONCLUSIVE": ExitCode.INCONCLUSIVE,
}  # fmt: skip


def require_known_waivers(waivers: Sequence[Waiver], families: Collection[str]) -> None:
    """Refuse a waiver of a check or a family that is unknown; the registry of checks is filled by the caller.

    Args:
        waivers: of the gate.
        families: those of the gate's models; the table's are known too.

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
    """Index of the waiver that covers a violation, one that has not expired before one that has."""
    if not finding.violated or cell.kind == "faults":
        return None
    covering = [
        (item.expired(today), place)
        for place, item in enumerate(waivers)
        if item.check == finding.check and (item.model == cell.model if item.model else item.family == cell.family)
    ]
    return min(covering)[1] if covering else None


def decided(cells: Sequence[CellResult], uses: Sequence[WaiverUse]) -> tuple[Decision, list[str], str]:
    """Return the decision, its reasons, and the first bad stage of all violations that are not waived."""
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
    if not cells:
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
