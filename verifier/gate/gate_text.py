"""The text of a gate's result: the decision first, then cells, findings from the first bad stage on, and waivers."""

from __future__ import annotations

import io
import shutil
from collections.abc import Sequence

from verifier.core.outputs import printable
from verifier.core.stage import Stage
from verifier.gate.cell_order import estimate_s
from verifier.gate.deciding import unwaived
from verifier.gate.default_matrix import Matrix
from verifier.gate.gate_result import Cell, CellResult, GateFinding, GateResult, LeftOut, WaiverUse

MAX_FINDINGS = 10
"""Findings that are shown whole; `--json` has all."""


def render_gate(result: GateResult) -> str:
    """Return the whole text."""
    parts = [_decision(result), _table(result.cells), *_findings(result), _failed_before(result.cells)]
    parts += [_waivers(result.waivers), left_out(result.left_out), _end(result)]
    return "\n".join(part for part in parts if part)


def listed(matrix: Matrix) -> str:
    """Cells in the order in which they would run, with their expected seconds, and what is left out."""
    lines, last = [], ""
    for cell in matrix.cells:
        seconds = estimate_s(cell, last)
        last = cell.engine or last
        lines.append(f"{seconds:5.0f} s  {cell.id}: {', '.join(cell.carries)}\n")
    return "".join(lines) + f"{len(lines)} cells; seconds of a tiny model on two cores\n" + left_out(matrix.left_out)


def _decision(result: GateResult) -> str:
    lines = [f"{result.decision}: {_counted(result.cells)}"]
    if result.first_bad_stage:
        lines.append(f"first bad stage: {result.first_bad_stage}")
    return "".join(f"{line}\n" for line in [*lines, *(printable(f"  {reason}") for reason in result.reasons)])


def _counted(cells: Sequence[CellResult]) -> str:
    counts: dict[str, int] = {}
    for item in cells:
        name = "waived" if item.waived else item.status
        counts[name] = counts.get(name, 0) + 1
    said = ", ".join(f"{number} {name}" for name, number in counts.items())
    return f"{len(cells)} cell{'' if len(cells) == 1 else 's'}: {said}"


def _table(cells: Sequence[CellResult]) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=box.ASCII)
    for name in ("cell", "verdict", "checks", "first bad", "s"):
        drawn.add_column(name, justify="right" if name in ("checks", "s") else "left")
    for item in cells:
        verdict = "waived" if item.waived else item.status
        checks = str(len(item.checks)) if item.checks else "-"
        seconds = f"{item.seconds:.0f}" if item.seconds else "-"
        drawn.add_row(item.cell.id, verdict, checks, item.first_bad_stage or "-", seconds)
    console = Console(file=io.StringIO(), width=max(120, shutil.get_terminal_size().columns), highlight=False)
    console.print(drawn, markup=False)
    text: str = console.file.getvalue()  # type: ignore[attr-defined]  # a StringIO
    return text


def _findings(result: GateResult) -> list[str]:
    """Each root of a cell whole, with its consequences in one line; the earliest in the flow of data first."""
    order = {stage.label: stage for stage in Stage}
    bad = [(cell, unwaived(cell)) for cell in result.cells if cell.cell.kind != "faults"]
    bad = [(cell, findings) for cell, findings in bad if findings]
    bad.sort(key=lambda item: (order.get(item[1][0].stage, len(order)), item[0].cell.id))
    parts = [_finding(cell, findings) for cell, findings in bad[:MAX_FINDINGS]]
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
    return "".join(f"waiver: {printable(waiver_line(item))}\n" for item in uses)


def waiver_line(item: WaiverUse) -> str:
    """One line on a waiver and what came of it."""
    of = f"family {item.family}" if item.family else item.model
    came = f"waives {item.num_waived:,}"
    if item.expired:
        came = f"EXPIRED, it waives nothing, {item.num_expired:,} would fall under it"
    elif not item.num_waived:
        came = "matched nothing: remove it if what it waives is mended"
    return f"{item.check} of {of}, {item.issue}, {item.owner}: {item.reason}, until {item.until}; {came}"


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
