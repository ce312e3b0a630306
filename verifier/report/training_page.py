"""The page of a training run: its numbers over the steps, and a card for each of its last recorded steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from verifier.core.finding import Verdict
from verifier.report import Report, report_of
from verifier.report.gate_page import readable_trace
from verifier.report.report_page import page_of_report
from verifier.report.run_charts import metrics_of, run_charts
from verifier.report.trace_charts import charts_of
from verifier.report.view import TONES, Block, Card, Group, Page

MAX_STEPS = 12
"""Steps that are judged again for the page, the last ones; the page says how many it leaves out."""
SAMPLES, MAX_SAMPLES = "samples.jsonl", 24
"""File of a run's sampled texts, and how many of them the page has, the last ones."""
_SAID = ("loss", "reward", "held_out_reward", "accuracy", "mismatch_p99", "peak_memory_gib", "time_s")
"""Numbers of the last step in the page's head."""


def page_of_run(run: Path) -> Page:
    """Page of a run's folder; its recorded steps are judged again. Without any the decision is inconclusive."""
    rows = metrics_of(run)
    folders = sorted(path for path in (run / "steps").glob("*") if (path / "manifest.json").is_file())
    cards, pages = [], []
    verdict = Verdict.HOLDS if folders else Verdict.INCONCLUSIVE
    for folder in folders[-MAX_STEPS:]:
        trace = readable_trace(folder)
        if trace is None:
            verdict = max(verdict, Verdict.INCONCLUSIVE)
            cards.append(Card(title=f"step {_step(folder)}", verdict="inconclusive", tone="unsure", note="not whole"))
            continue
        report = report_of(trace, str(folder))
        page = page_of_report(report, trace)
        verdict = max(verdict, report.verdict)
        pages.append((folder, page))
        charts = charts_of(trace)
        cards.append(_card(folder, report, page, charts=charts))
    decision = verdict.name.lower()
    bad = [(folder, page) for folder, page in pages if page.roots]
    notes = [f"steps that are recorded and left out here: {left:,}"] if (left := len(folders) - MAX_STEPS) > 0 else []
    if not folders:
        notes.append("no step is recorded here: a run keeps what `verify.keep` says")
    return Page(
        title=f"training run {run}", decision=decision, tone=TONES[decision], summary=_summary(rows, len(cards)),
        stage=bad[0][1].stage if bad else "", reasons=bad[0][1].reasons if bad else (),
        roots=tuple(_root(folder, page) for folder, page in bad), charts=run_charts(rows), notes=tuple(notes),
        groups=(Group(title="recorded steps", cards=tuple(cards)),) if cards else (),
        run=pages[-1][1].run if pages else (), samples=tuple(metrics_of(run, SAMPLES)[-MAX_SAMPLES:]),
    )  # fmt: skip


def _root(folder: Path, page: Page) -> Block:
    root, *others = page.roots
    later = (*others, *root.later)
    return Block(
        title=root.title, text=root.text, place=f"step {_step(folder)}", stage=root.stage, replay=root.replay,
        known_bug=root.known_bug, later=later,
    )  # fmt: skip


def _card(folder: Path, report: Report, page: Page, *, charts: tuple[Any, ...]) -> Card:
    checks = tuple(
        (item.code, item.name, (word := item.verdict.name.lower()), TONES[word], item.num_compared)
        for item in report.outcomes
    )
    return Card(
        title=f"step {_step(folder)}", verdict=page.decision, tone=page.tone, note=page.stage, blocks=page.roots,
        checks=checks, charts=charts, facts=(("trace", str(folder)),),
    )  # fmt: skip


def _step(folder: Path) -> str:
    return folder.name.lstrip("0") or "0"


def _summary(rows: Sequence[Mapping[str, Any]], num_judged: int) -> str:
    if not rows:
        return f"{num_judged:,} steps judged; no metrics"
    last = rows[-1]
    said = [f"{key} {value:.4g}" for key in _SAID if isinstance(value := last.get(key), int | float)]
    signs = last.get("signs") or []
    said += [f"sign: {sign}" for sign in signs if isinstance(sign, str)]
    return f"step {last.get('step', '?')}: {', '.join(said)}; {num_judged:,} recorded steps judged again"
