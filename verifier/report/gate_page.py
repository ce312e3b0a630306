"""The page of a gate: a card per cell, findings led by their roots, waivers, and the charts of each cell's trace."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from verifier.core import store
from verifier.core.trace import Trace
from verifier.errors import UsageError
from verifier.report.charts import Chart
from verifier.report.gate_result import CellResult, GateFinding, GateResult, Kind, WaiverUse
from verifier.report.gate_text import waiver_line
from verifier.report.run_charts import metrics_of, run_charts
from verifier.report.trace_charts import charts_of
from verifier.report.view import TONES, Block, Card, Group, Page, WaiverRow, below


def page_of_gate(result: GateResult, folder: Path | None = None) -> Page:
    """Page of a gate's result.

    Args:
        result: the gate.
        folder: where its traces are, the folder that it names if None; charts of traces that are not there are absent.
    """
    folder = Path(result.folder) if folder is None else folder
    stand_ins: dict[str, None] = {}
    cards = {item.cell.id: _card(result, item, folder, stand_ins) for item in result.cells}
    groups = []
    for model in dict.fromkeys(item.cell.model for item in result.cells):
        for kind in get_args(Kind):
            own = [item for item in result.cells if (item.cell.model, item.cell.kind) == (model, kind)]
            if own:
                groups.append(Group(title=f"{kind} {model}", cards=tuple(cards[item.cell.id] for item in own)))
    notes = [f"{item.what}: {item.reason}" for item in result.left_out]
    notes += [
        f"failed in an earlier attempt: {item.cell.id}: {why}" for item in result.cells for why in item.failed_before
    ]
    return Page(
        title=f"gate {' '.join(result.models)}", decision=result.decision, tone=TONES[result.decision],
        summary=result.counted, stage=result.first_bad_stage, reasons=result.reasons, roots=_roots(result, folder),
        groups=tuple(groups), waivers=tuple(map(_waiver, result.waivers)), notes=tuple(notes),
        run=_run(result, list(stand_ins)),
    )  # fmt: skip


def _roots(result: GateResult, folder: Path) -> tuple[Block, ...]:
    """The first finding of each bad cell with the others under it, the earliest in the flow of data first."""
    roots = [_folded(result, cell, cell.unwaived, folder) for cell in result.bad_cells]
    for cell in result.cells:
        if cell.status == "failed" or (cell.cell.kind == "faults" and cell.status == "violated"):
            first, _, rest = cell.reason.partition("\n")
            roots.append(
                Block(title=first, text=rest, place=cell.cell.id, stage=cell.cell.stage, replay=cell.cell.command)
            )
    return tuple(roots)


def _folded(result: GateResult, cell: CellResult, findings: Sequence[GateFinding], folder: Path) -> Block:
    root, *later = (_block(result, item, folder) for item in findings)
    return Block(
        title=root.title, text=root.text, place=cell.cell.id, stage=root.stage, replay=root.replay or cell.cell.command,
        waiver=root.waiver, known_bug=root.known_bug, later=tuple(later),
    )  # fmt: skip


def _block(result: GateResult, finding: GateFinding, folder: Path) -> Block:
    waiver = "" if finding.waived_by is None else waiver_line(result.waivers[finding.waived_by])
    replay = f"verifier replay {shlex.quote(str(folder / finding.trace))} --check {finding.check}"
    return Block(
        title=finding.sentence, text=below(finding.text), stage=finding.stage,
        replay=replay if finding.trace else "", waiver=waiver, known_bug=finding.known_bug,
    )  # fmt: skip


def _card(result: GateResult, item: CellResult, folder: Path, stand_ins: dict[str, None]) -> Card:
    cell = item.cell
    verdict = item.verdict
    axes = [
        cell.fault or cell.algorithm,
        {"float32": "fp32", "bfloat16": "bf16"}.get(cell.dtype, cell.dtype),
        cell.mesh,
    ]
    facts = [
        ("shows", ", ".join(cell.carries)), ("took", f"{item.seconds:,.0f} s, from {item.began}" if item.began else ""),
        ("reason", item.reason), ("first bad stage", item.first_bad_stage), ("must be caught in", cell.stage),
        ("not judged", "; ".join(item.not_judged)), ("trace", str(folder / item.trace) if item.trace else ""),
        ("run it alone", cell.command),
    ]  # fmt: skip
    charts = _charts(folder / item.trace, stand_ins) if item.trace and cell.kind != "faults" else ()
    blocks = (_folded(result, item, item.findings, folder),) if item.findings else ()
    return Card(
        title=", ".join(filter(None, [*axes, cell.engine, cell.transport])), verdict=verdict, tone=TONES[verdict],
        note=" ".join(filter(None, [f"{item.seconds:,.0f} s" if item.seconds else "", item.first_bad_stage])),
        facts=tuple((name, value) for name, value in facts if value), blocks=blocks, charts=charts,
        checks=tuple(
            (check.code, check.name, check.verdict, TONES[check.verdict], check.num_compared) for check in item.checks
        ),
    )  # fmt: skip


def _charts(path: Path, stand_ins: dict[str, None]) -> tuple[Chart, ...]:
    """Charts of a cell's trace or training run, whose stand-ins are added to those given."""
    trace = readable_trace(path)
    if trace is None:
        for step in sorted((path / "steps").glob("*"))[:1]:
            if (first := readable_trace(step)) is not None:
                stand_ins.update(dict.fromkeys(first.manifest.stand_ins))
        return run_charts(metrics_of(path))
    stand_ins.update(dict.fromkeys(trace.manifest.stand_ins))
    return charts_of(trace)


def readable_trace(path: Path) -> Trace | None:
    """The trace of a folder; None where there is none any more, or not a whole one."""
    try:
        return store.read(path)
    except UsageError:
        return None


def _waiver(item: WaiverUse) -> WaiverRow:
    came = waiver_line(item).rpartition("; ")[2]
    return WaiverRow(
        what=item.check, of=f"family {item.family}" if item.family else item.model, issue=item.issue, owner=item.owner,
        reason=item.reason, until=item.until, came=came,
    )  # fmt: skip


def _run(result: GateResult, stand_ins: Sequence[str]) -> tuple[tuple[str, str], ...]:
    lines = [
        ("made by", f"verifier {result.verifier}" + (f", commit {result.commit}" if result.commit else "")),
        ("on", ", ".join([result.host, f"tier {result.tier}", *result.gpus])),
        ("from", f"{result.began} to {result.ended}, {result.seconds:,.0f} s of cells"),
        ("budget", f"{result.budget_minutes:g} minutes" if result.budget_minutes is not None else ""),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))),
        ("fixes on", ", ".join(result.fixes)), ("stands in", ", ".join(stand_ins)), ("folder", result.folder),
    ]  # fmt: skip
    return tuple((name, value) for name, value in lines if value)
