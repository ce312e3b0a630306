"""The text of a gate's result: the decision first, then cells, findings from the first bad stage on, and waivers."""

from __future__ import annotations

from collections.abc import Sequence

from verifier.core.outputs import printable
from verifier.report.gate_result import Cell, CellResult, GateFinding, GateResult, LeftOut, WaiverUse
from verifier.report.tables import framed

MAX_FINDINGS = 10
"""Findings that are shown whole; `--json` has all."""


def render_gate(result: GateResult) -> str:
    """Return the whole text."""
    parts = [_decision(result), _table(result.cells), *_findings(result), _failed_before(result.cells)]
    parts += [_waivers(result.waivers), left_out(result.left_out), _end(result)]
    return "\n".join(part for part in parts if part)


def _decision(result: GateResult) -> str:
    lines = [f"{result.decision}: {result.counted}"]
    if result.first_bad_stage:
        lines.append(f"first bad stage: {result.first_bad_stage}")
    return "".join(f"{line}\n" for line in [*lines, *(printable(f"  {reason}") for reason in result.reasons)])


def _table(cells: Sequence[CellResult]) -> str:
    rows = [
        (
            item.cell.id, item.verdict, str(len(item.checks) or "-"), item.first_bad_stage or "-",
            f"{item.seconds:.0f}" if item.seconds else "-",
        )
        for item in cells
    ]  # fmt: skip
    return framed(("cell", "verdict", "checks", "first bad", "s"), rows, left=("cell", "verdict", "first bad"))


def _findings(result: GateResult) -> list[str]:
    """Each root of a cell whole, with its consequences in one line; the earliest in the flow of data first."""
    bad = result.bad_cells
    parts = [_finding(cell, cell.unwaived) for cell in bad[:MAX_FINDINGS]]
    if len(bad) > MAX_FINDINGS:
        parts.append(f"{len(bad) - MAX_FINDINGS} more cells are left out here; `--json` holds all\n")
    failed = [cell for cell in result.cells if cell.status == "failed"]
    return parts + [_block(cell.cell, cell.reason) for cell in failed[:MAX_FINDINGS]]


def _finding(result: CellResult, findings: Sequence[GateFinding]) -> str:
    text = findings[0].text
    if findings[1:]:
        later = "\n".join(f"  {item.sentence}" for item in findings[1:])
        text += f"\nafter it in the flow of data, so perhaps its consequences:\n{later}"
    return _block(result.cell, text)


def _block(cell: Cell, text: str) -> str:
    lines = "\n".join(f"  {printable(line)}" for line in text.splitlines())
    return f"{printable(cell.id)} (`{printable(cell.command)}`)\n{lines}\n"


def _failed_before(cells: Sequence[CellResult]) -> str:
    return "".join(
        f"failed in an earlier attempt: {printable(f'{item.cell.id}: {why}')}\n"
        for item in cells
        for why in item.failed_before
    )


def _waivers(uses: Sequence[WaiverUse]) -> str:
    return "".join(f"waiver: {printable(item.line)}\n" for item in uses)


def left_out(items: Sequence[LeftOut]) -> str:
    """Lines on what the matrix does not have."""
    return "".join(f"left out: {printable(item.what)}: {printable(item.reason)}\n" for item in items)


def _end(result: GateResult) -> str:
    stack = ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))
    machine = ", ".join([result.host, *result.gpus])
    code = f"verifier {result.verifier}" + (f" at {result.commit}" if result.commit else "")
    fixes = f"fixes on: {', '.join(result.fixes)}\n" if result.fixes else ""
    return (
        f"{result.began} to {result.ended}, {result.seconds:,.0f} s of cells; {machine}\n{code}; {stack}\n{fixes}"
        f"gate: {result.folder}\n{_answer(result)}\n"
    )


def _answer(result: GateResult) -> str:
    return result.decision if not result.reasons else f"{result.decision}: {printable(result.reasons[0])}"
