"""The page of one trace: its verdict, the finding that data met first, a card per check, and its charts."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from verifier.core.finding import Outcome
from verifier.core.trace import Trace
from verifier.report import Report, render_text
from verifier.report.detail import Detail
from verifier.report.header import header
from verifier.report.render_text import first_line, render_outcome
from verifier.report.report import explanation
from verifier.report.trace_charts import charts_of
from verifier.report.view import TONES, Block, Card, Group, Page, below


def page_of_report(report: Report, trace: Trace) -> Page:
    """Page of a report, with the charts of its trace."""
    title, *rest = header(report.manifest).splitlines()
    answer = render_text(report, Detail.ANSWER).splitlines()
    groups: dict[str, list[Card]] = {}
    for item in report.outcomes:
        groups.setdefault(item.code.rstrip("0123456789"), []).append(_card(report, item))
    off = {"switched off": report.switched_off, "no subject in this run": report.out_of_scope,
           "not come to": report.unreached}  # fmt: skip
    notes = [f"{why}: {', '.join(codes)}" for why, codes in off.items() if codes]
    verdict = report.verdict.name.lower()
    first = report.violated[0].finding if report.violated else None
    return Page(
        title=title, decision=verdict, tone=TONES[verdict], summary=answer[0],
        stage=first.first_bad_stage.label if first else "", reasons=tuple(answer[1:]),
        roots=_roots(report, report.violated), charts=charts_of(trace), notes=(*notes, *report.not_judged),
        groups=tuple(Group(title=f"checks {prefix}", cards=tuple(cards)) for prefix, cards in groups.items()),
        run=tuple(_named(line) for line in rest),
    )  # fmt: skip


def _named(line: str) -> tuple[str, str]:
    """Name and value of a line of the header; the lines of options and of versions have no name there."""
    name, colon, value = line.strip().partition(": ")
    return (name, value) if colon and "," not in name else ("", line.strip())


def _roots(report: Report, violated: Sequence[Outcome]) -> tuple[Block, ...]:
    """Violations of the first bad place; what data met later is folded under the last of them."""
    places = [item.finding.first.place for item in violated if item.finding]
    num = sum(place == places[0] for place in places)
    roots = [_block(report, item) for item in violated[:num]]
    if not roots:
        return ()
    later = tuple(_block(report, item) for item in violated[num:])
    last = roots[-1]
    roots[-1] = Block(
        title=last.title, text=last.text, stage=last.stage, replay=last.replay, known_bug=last.known_bug, later=later
    )
    return tuple(roots)


def _block(report: Report, outcome: Outcome) -> Block:
    finding = outcome.finding
    only = "" if finding is None or " " in finding.first.what else f" --only {shlex.quote(finding.first.what)}"
    return Block(
        title=first_line(outcome),
        text=below(render_outcome(outcome, report.trace, report.manifest)),
        stage=finding.first_bad_stage.label if finding else "",
        replay=f"verifier replay {shlex.quote(report.trace)} --check {outcome.code}{only}",
        known_bug=explanation(outcome, report.manifest),
    )


def _card(report: Report, outcome: Outcome) -> Card:
    verdict = outcome.verdict.name.lower()
    return Card(
        title=f"{outcome.code} {outcome.name}", verdict=verdict, tone=TONES[verdict],
        note=f"{outcome.num_compared:,} compared", blocks=(_block(report, outcome),),
    )  # fmt: skip
