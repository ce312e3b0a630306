"""Pages of what was judged: a trace, a gate, a training run; and of any of them by its path."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from verifier.core import store
from verifier.core.finding import Outcome, Verdict
from verifier.core.ledger import read_rows
from verifier.core.outputs import read_as
from verifier.core.reader import has_evidence
from verifier.core.trace import Trace
from verifier.errors import UsageError
from verifier.report.charts import Chart, Series, charts_of
from verifier.report.gate_result import RESULT, CellResult, GateFinding, GateResult, Kind, check_verdicts
from verifier.report.render_html import Block, Card, Page
from verifier.report.render_text import Detail, first_line, header, render_outcome, render_text
from verifier.report.report import Report, explanation, report_of

MAX_STEPS = 12
"""Steps of a training run that are judged again for its page, the last ones; the page says how many it leaves out."""
SAMPLES, MAX_SAMPLES = "samples.jsonl", 24
"""File of a run's sampled texts, and how many of them the page has, the last ones."""
_SAID = ("loss", "reward", "held_out_reward", "accuracy", "mismatch_p99", "peak_memory_gib", "time_s")
"""Numbers of the last step in the head of a training run's page."""


def page_of(path: Path) -> Page:
    """Page of what lies at a path.

    Raises:
        UsageError: nothing that has a page.
    """
    if (gate := gate_at(path)) is not None:
        return page_of_gate(gate, path if path.is_dir() else None)
    if (path / METRICS).is_file() or (path / "steps").is_dir():
        return page_of_run(path)
    trace = store.read(path)
    return page_of_report(report_of(trace, str(path)), trace)


def gate_at(path: Path) -> GateResult | None:
    """Result of a gate, from its JSON or from its folder; None for another folder.

    Raises:
        UsageError: a file that is no gate's result, or nothing at all.
    """
    file = path / RESULT if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        return None
    return read_as(file, GateResult, "the JSON that `verifier gate --json` writes")


def _readable(path: Path) -> Trace | None:
    """The trace of a folder; None where there is none any more, or not a whole one."""
    try:
        return store.read(path)
    except UsageError:
        return None


def _below(text: str) -> str:
    """Text of a finding under its sentence, without the line that replays it, which the page has apart."""
    return "\n".join(line for line in text.splitlines()[1:] if not line.startswith("  replay    : "))


def page_of_report(report: Report, trace: Trace) -> Page:
    """Page of a report, with the charts of its trace."""
    title, *rest = header(report.manifest).splitlines()
    answer = render_text(report, Detail.ANSWER).splitlines()
    groups: dict[str, tuple[Card, ...]] = {}
    for item in report.outcomes:
        name = f"checks {item.code.rstrip('0123456789')}"
        card = Card(
            title=f"{item.code} {item.name}",
            verdict=item.verdict.name.lower(),
            note=f"{item.num_compared:,} compared",
            blocks=(_outcome_block(report, item),),
        )
        groups[name] = (*groups.get(name, ()), card)
    off = {
        "switched off": report.switched_off,
        "no subject in this run": report.out_of_scope,
        "not come to": report.unreached,
    }
    roots, later = report.roots, tuple(_outcome_block(report, item) for item in report.later)
    blocks = [_outcome_block(report, item) for item in roots]
    if later:
        blocks[-1] = replace(blocks[-1], later=later)
    return Page(
        title=title,
        decision=report.verdict.name.lower(),
        summary=answer[0],
        stage=roots[0].finding.first_bad_stage.label if roots and roots[0].finding else "",
        reasons=tuple(answer[1:]),
        roots=tuple(blocks),
        charts=charts_of(trace),
        notes=(*(f"{why}: {', '.join(codes)}" for why, codes in off.items() if codes), *report.not_judged),
        groups=groups,
        run=tuple(map(_named, rest)),
    )


def _named(line: str) -> tuple[str, str]:
    name, colon, value = line.strip().partition(": ")
    return (name, value) if colon and "," not in name else ("", line.strip())


def _outcome_block(report: Report, outcome: Outcome) -> Block:
    finding = outcome.finding
    only = "" if finding is None or " " in finding.first.what else f" --only {shlex.quote(finding.first.what)}"
    return Block(
        title=first_line(outcome),
        text=_below(render_outcome(outcome, report.trace, report.manifest)),
        stage=finding.first_bad_stage.label if finding else "",
        replay=f"verifier replay {shlex.quote(report.trace)} --check {outcome.code}{only}",
        known_bug=explanation(outcome, report.manifest),
    )


def page_of_gate(result: GateResult, folder: Path | None = None) -> Page:
    """Page of a gate's result; traces are in `folder`, by default the one that it names. Charts need the traces."""
    folder = Path(result.folder) if folder is None else folder
    stand_ins: dict[str, None] = {}
    cards = {item.cell.id: _cell_card(result, item, folder, stand_ins) for item in result.cells}
    groups: dict[str, tuple[Card, ...]] = {}
    for model in dict.fromkeys(item.cell.model for item in result.cells):
        for kind in get_args(Kind):
            own = [item.cell.id for item in result.cells if (item.cell.model, item.cell.kind) == (model, kind)]
            if own:
                groups[f"{kind} {model}"] = tuple(cards[name] for name in own)
    failed_before = ((item.cell.id, why) for item in result.cells for why in item.failed_before)
    return Page(
        title=f"gate {' '.join(result.models)}",
        decision=result.decision,
        summary=result.counted,
        stage=result.first_bad_stage,
        reasons=result.reasons,
        roots=tuple(_roots_of_gate(result, folder)),
        groups=groups,
        waivers=result.waivers,
        notes=(
            *(f"{item.what}: {item.reason}" for item in result.left_out),
            *(f"failed in an earlier attempt: {name}: {why}" for name, why in failed_before),
        ),
        run=tuple((name, value) for name, value in _machine(result, stand_ins) if value),
    )


def _roots_of_gate(result: GateResult, folder: Path) -> Iterator[Block]:
    """The first finding of each bad cell with the others under it, then cells that failed or missed a fault."""
    for item in result.bad_cells:
        yield _folded(result, item, item.unwaived, folder)
    for item in result.cells:
        if item.status == "failed" or (item.cell.kind == "faults" and item.status == "violated"):
            first, _, rest = item.reason.partition("\n")
            yield Block(title=first, text=rest, place=item.cell.id, stage=item.cell.stage, replay=item.cell.command)


def _folded(result: GateResult, cell: CellResult, findings: Sequence[GateFinding], folder: Path) -> Block:
    root, *later = (_finding_block(result, item, folder) for item in findings)
    return replace(root, place=cell.cell.id, replay=root.replay or cell.cell.command, later=tuple(later))


def _finding_block(result: GateResult, finding: GateFinding, folder: Path) -> Block:
    replay = f"verifier replay {shlex.quote(str(folder / finding.trace))} --check {finding.check}"
    return Block(
        title=finding.sentence,
        text=_below(finding.text),
        stage=finding.stage,
        replay=replay if finding.trace else "",
        waiver="" if finding.waived_by is None else result.waivers[finding.waived_by].line,
        known_bug=finding.known_bug,
    )


def _cell_card(result: GateResult, item: CellResult, folder: Path, stand_ins: dict[str, None]) -> Card:
    cell = item.cell
    dtype = {"float32": "fp32", "bfloat16": "bf16"}.get(cell.dtype, cell.dtype)
    axes = (cell.fault or cell.algorithm, dtype, cell.mesh, cell.engine, cell.transport)
    facts = {
        "shows": ", ".join(cell.carries),
        "took": f"{item.seconds:,.0f} s, from {item.began}" if item.began else "",
        "reason": item.reason,
        "first bad stage": item.first_bad_stage,
        "must be caught in": cell.stage,
        "not judged": "; ".join(item.not_judged),
        "trace": str(folder / item.trace) if item.trace else "",
        "run it alone": cell.command,
    }
    return Card(
        title=", ".join(filter(None, axes)),
        verdict=item.verdict,
        note=" ".join(filter(None, [f"{item.seconds:,.0f} s" if item.seconds else "", item.first_bad_stage])),
        facts=tuple((name, value) for name, value in facts.items() if value),
        blocks=(_folded(result, item, item.findings, folder),) if item.findings else (),
        charts=_cell_charts(folder / item.trace, stand_ins) if item.trace and cell.kind != "faults" else (),
        checks=item.checks,
    )


def _cell_charts(path: Path, stand_ins: dict[str, None]) -> tuple[Chart, ...]:
    """Charts of a cell's trace or training run, whose stand-ins are added to those given."""
    trace = _readable(path)
    first = trace or next(map(_readable, sorted((path / "steps").glob("*"))), None)
    if first is not None:
        stand_ins.update(dict.fromkeys(first.manifest.stand_ins))
    return run_charts(metrics_of(path)) if trace is None else charts_of(trace)


def _machine(result: GateResult, stand_ins: Mapping[str, None]) -> list[tuple[str, str]]:
    return [
        ("made by", f"verifier {result.verifier}" + (f", commit {result.commit}" if result.commit else "")),
        ("on", ", ".join([result.host, f"tier {result.tier}", *result.gpus])),
        ("from", f"{result.began} to {result.ended}, {result.seconds:,.0f} s of cells"),
        ("budget", f"{result.budget_minutes:g} minutes" if result.budget_minutes is not None else ""),
        ("versions", ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))),
        ("fixes on", ", ".join(result.fixes)),
        ("stands in", ", ".join(stand_ins)),
        ("folder", result.folder),
    ]


def page_of_run(run: Path) -> Page:
    """Page of a run's folder; its recorded steps are judged again. Without any the decision is inconclusive."""
    rows = metrics_of(run)
    every = sorted(path for path in (run / "steps").glob("*") if (path / "manifest.json").is_file())
    folders = [path for path in every if has_evidence(path)]
    verdict = Verdict.HOLDS if folders else Verdict.INCONCLUSIVE
    cards: list[Card] = []
    roots: list[Block] = []
    pages: list[Page] = []
    for folder in folders[-MAX_STEPS:]:
        step = f"step {folder.name.lstrip('0') or '0'}"
        if (trace := _readable(folder)) is None:
            verdict = max(verdict, Verdict.INCONCLUSIVE)
            cards.append(Card(title=step, verdict="inconclusive", note="not whole"))
            continue
        report = report_of(trace, str(folder))
        verdict = max(verdict, report.verdict)
        page = page_of_report(report, trace)
        pages.append(page)
        cards.append(
            Card(
                title=step,
                verdict=page.decision,
                note=page.stage,
                blocks=page.roots,
                checks=check_verdicts([report.outcomes]),
                charts=page.charts,
                facts=(("trace", str(folder)),),
            )
        )
        if page.roots:
            root, *others = page.roots
            roots.append(replace(root, place=step, later=(*others, *root.later)))
    first = next((page for page in pages if page.roots), None)
    notes = [f"steps that are recorded and left out here: {left:,}"] if (left := len(folders) - MAX_STEPS) > 0 else []
    if removed := len(every) - len(folders):
        notes.append(f"steps that held and whose records verify.keep has removed: {removed:,}")
    if not every:
        notes.append("no step is recorded here")
    return Page(
        title=f"training run {run}",
        decision=verdict.name.lower(),
        summary=_summary(rows, len(cards)),
        stage=first.stage if first else "",
        reasons=first.reasons if first else (),
        roots=tuple(roots),
        charts=run_charts(rows),
        notes=tuple(notes),
        groups={"recorded steps": tuple(cards)} if cards else {},
        run=pages[-1].run if pages else (),
        samples=tuple(metrics_of(run, SAMPLES)[-MAX_SAMPLES:]),
    )


def _summary(rows: Sequence[Mapping[str, Any]], num_judged: int) -> str:
    if not rows:
        return f"{num_judged:,} steps judged; no metrics"
    last = rows[-1]
    said = [f"{key} {value:.4g}" for key in _SAID if isinstance(value := last.get(key), int | float)]
    said += [f"sign: {sign}" for sign in last.get("signs") or [] if isinstance(sign, str)]
    return f"step {last.get('step', '?')}: {', '.join(said)}; {num_judged:,} recorded steps judged again"


METRICS = "metrics.jsonl"
MAX_POINTS = 400
"""Steps that are drawn; of more, every n-th."""
_TIMES = ("rollout_s", "score_s", "train_s", "sync_s")
"""Stages of a step; `prepare_s` holds the first two."""
_LEARNING = {"loss": "loss", "entropy": "nats", "kl": "nats", "grad_norm": "L2 norm", "answer_tokens": "tokens"}
"""Metric that has a chart of its own -> unit."""

Row = Mapping[str, Any]


def metrics_of(run: Path, name: str = METRICS) -> list[dict[str, Any]]:
    """Lines of a run's metrics, or of another of its files of JSON lines; none where it has no such file."""
    return read_rows(run / name, dict[str, Any])


def run_charts(rows: Sequence[Row]) -> tuple[Chart, ...]:
    """All charts that the lines have numbers for."""
    rows = rows[:: max(1, -(-len(rows) // MAX_POINTS))]
    return tuple(chart for chart in _charts(rows) if any(item.points for item in chart.series))


def _charts(rows: Sequence[Row]) -> Iterator[Chart]:
    rewards = {"reward": "reward", "held_out_reward": "held-out reward", "accuracy": "accuracy"}
    yield Chart(title="Reward", x="step", y="reward, share", series=_lines(rows, rewards))
    for key, unit in _LEARNING.items():
        name = key.replace("_", " ")
        yield Chart(title=name.capitalize(), x="step", y=unit, series=_lines(rows, {key: name}))
    floor = tuple(Series(name=item.name, points=item.points, kind="bound", colour=3)
                  for item in _lines(rows, {"mismatch_floor": "floor: p99 of the first steps"}))  # fmt: skip
    yield Chart(
        title="Mismatch of trainer and engine over the run", x="step", y="nats", log=True,
        series=(*_lines(rows, {"mismatch_p99": "p99", "mismatch_max": "greatest"}), *floor),
    )  # fmt: skip
    yield from _by_position(rows)
    stages = [name for name in _TIMES if any(_number(row, name) is not None for row in rows)]
    yield Chart(
        title="Time by stage", x="step", y="seconds",
        series=tuple(
            Series(name=name.removesuffix("_s"), points=_points(rows, name), kind="bars", colour=colour)
            for colour, name in enumerate(stages)
        ),
    )  # fmt: skip
    sync = _lines(rows, {"transfer_gb_per_s": "export, transfer and load, engine's caches included"})
    yield Chart(title="Bandwidth of the weight sync", x="step", y="GB/s", series=sync)
    memory = _lines(rows, {"peak_memory_gib": "peak of rank 0 so far"})
    yield Chart(title="Memory", x="step", y="GiB", series=memory)


def _by_position(rows: Sequence[Row]) -> Iterator[Chart]:
    """The last step that sampled beside the first, eighth by eighth of the longest allowed answer."""
    known = [row for row in rows if isinstance(row.get("mismatch_by_position"), list)]
    if not known:
        return
    series = []
    for colour, row in enumerate(dict.fromkeys((0, len(known) - 1))):
        values = known[row]["mismatch_by_position"]
        points = tuple((place + 1.0, value) for place, value in enumerate(values) if isinstance(value, float))
        series.append(Series(name=f"step {known[row].get('step', '?')}", points=points, colour=colour))
    yield Chart(
        title="Mismatch by position", x="eighth of the longest answer", y="nats", log=True,
        names={place + 1.0: str(place + 1) for place in range(8)}, series=tuple(series),
    )  # fmt: skip


def _lines(rows: Sequence[Row], names: Mapping[str, str]) -> tuple[Series, ...]:
    known = [(key, name) for key, name in names.items() if any(_number(row, key) is not None for row in rows)]
    return tuple(
        Series(name=name, points=_points(rows, key), colour=colour) for colour, (key, name) in enumerate(known)
    )


def _points(rows: Sequence[Row], key: str) -> tuple[tuple[float, float], ...]:
    pairs = [(_number(row, "step"), _number(row, key)) for row in rows]
    return tuple((step, value) for step, value in pairs if step is not None and value is not None)


def _number(row: Row, key: str) -> float | None:
    value = row.get(key)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
