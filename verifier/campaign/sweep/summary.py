"""Summary of a sweep: for each layout the largest budget and the fastest step, as JSON, and as a table.

Rows of a sweep: one per trial, appended and flushed to the disk as it ends, and read again to continue.

sweep.lock      who has the folder open
trials.jsonl    first what the sweep is of, then a line a trial
trials/         logs of the ranks of the last trial
config.json     of the model
sweep.json      summary
sweep.html      page with charts
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from verifier.config.sweep import SweepConfig
from verifier.core.ledger import append_line, decode_line, read_lines
from verifier.core.outputs import locked_folder
from verifier.errors import UsageError
from verifier.knob import flat
from verifier.report.charts import Chart, Series
from verifier.report.gate_result import LeftOut
from verifier.report.progress import framed
from verifier.report.render_html import Card, Page, html

Status = Literal["ok", "out_of_memory", "failed"]
FREE = ("ranks", "meshes", "recompute", "least_tokens", "most_tokens", "timeout_s", "trial_timeout_s", "run")
"""Knobs in which a sweep may be continued with another value: its rows are the same under all of them."""


class SweepRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One trial: a layout and a budget, and how its steps went."""

    layout: str
    """`SweptLayout.name`."""
    mesh: dict[str, int | None]
    recompute: str
    max_tokens: int
    """Budget of a micro-batch, tokens."""
    status: Status
    step_s: float | None = None
    """Median of the timed steps, seconds."""
    tokens_per_s: float | None = None
    """Tokens of all ranks a second, without padding."""
    peak_bytes: int | None = None
    """Highest peak of all ranks; of the ranks that could still say it where memory ran out. See `MemoryPeaks`."""
    reserved_bytes: int | None = None
    reason: str = ""
    """Why it did not run."""
    trial_s: float = 0.0
    """Seconds from the fork of the ranks to their end."""


def memory_file(run_dir: Path, rank: int) -> Path:
    """File of a rank's `MemoryPeaks`."""
    return run_dir / f"memory{rank:03d}.json"


@dataclass(frozen=True, slots=True)
class SweepRows:
    """File of a sweep's rows, open for this process alone."""

    file: Path
    rows: list[SweepRow]

    def add(self, row: SweepRow) -> None:
        """Append a row; it is on the disk when this returns.

        Raises:
            UsageError: it cannot be written.
        """
        append_line(self.file, row)
        self.rows.append(row)

    def tried(self, layout: str) -> dict[int, bool]:
        """Return budget -> whether it ran, for the trials of a layout."""
        return {row.max_tokens: row.status == "ok" for row in self.rows if row.layout == layout}


@contextlib.contextmanager
def opened_rows(config: SweepConfig, device: str) -> Iterator[SweepRows]:
    """Open the folder of a sweep, new or to be continued, and keep others out of it until exit.

    Raises:
        UsageError: the folder holds a sweep of other knobs or of another device, is in use, or cannot be written.
    """
    folder, file = config.run, config.run / "trials.jsonl"
    with locked_folder(folder, "sweep.lock", "folder", "sweep"):
        knobs = sorted(flat(config.to_dict()).items())
        asked = {"device": device, **{key: value for key, value in knobs if key not in FREE}}
        lines = read_lines(file)
        if lines:
            _require_same(folder, lines[0], asked)
        else:
            append_line(file, asked)
        rows = enumerate(lines[1:], start=2)
        yield SweepRows(file, [decode_line(file, number, line, SweepRow, "sweep") for number, line in rows])


def _require_same(folder: Path, line: bytes, asked: Mapping[str, Any]) -> None:
    try:
        found = msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.MsgspecError as problem:
        raise UsageError(
            f"`{folder / 'trials.jsonl'}` is no file of a sweep: {problem}; choose another --run"
        ) from None
    for key in sorted(found.keys() | asked.keys()):
        if found.get(key) != asked.get(key):
            raise UsageError(
                f"the folder `{folder}` holds a sweep with {key}={found.get(key)}, and {key}={asked.get(key)} is asked "
                "for: give the same value to continue it, or choose another --run"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutSummary:
    """Rows of one layout: the largest budget that ran, the fastest row, and the smallest that did not run."""

    layout: str
    largest: SweepRow | None
    fastest: SweepRow | None
    beyond: SweepRow | None


def summaries(rows: Sequence[SweepRow]) -> list[LayoutSummary]:
    """Return a summary per layout, the fastest first, those in which nothing ran last."""
    found: list[LayoutSummary] = []
    for layout in dict.fromkeys(row.layout for row in rows):
        ran = [row for row in rows if row.layout == layout and row.status == "ok"]
        failed = [row for row in rows if row.layout == layout and row.status != "ok"]
        found.append(
            LayoutSummary(
                layout=layout, largest=max(ran, key=lambda row: row.max_tokens, default=None),
                fastest=max(ran, key=speed, default=None),
                beyond=min(failed, key=lambda row: row.max_tokens, default=None),
            )
        )  # fmt: skip
    return sorted(found, key=lambda item: -speed(item.fastest))


def _best(found: Sequence[LayoutSummary]) -> tuple[SweepRow | None, SweepRow | None]:
    largest = [row for item in found if (row := item.largest) is not None]
    return found[0].fastest if found else None, max(largest, key=lambda row: row.max_tokens, default=None)


def speed(row: SweepRow | None) -> float:
    """Tokens a second of a row; 0 where nothing ran."""
    return 0.0 if row is None or row.tokens_per_s is None else row.tokens_per_s


def knobs_of(row: SweepRow) -> dict[str, Any]:
    """Knobs of `verifier train` that take the layout and the budget of a row."""
    sizes = {f"mesh.{axis}": size for axis, size in row.mesh.items() if size not in (None, 1)}
    return {**sizes, "megatron.recompute": row.recompute, "batch.max_tokens": row.max_tokens}


def words_of(row: SweepRow) -> str:
    """Words of a `verifier train` command line that take the layout and the budget of a row."""
    return " ".join(f"{key}={value}" for key, value in knobs_of(row).items())


def as_json(config: SweepConfig, device: str, rows: Sequence[SweepRow], invalid: Sequence[LeftOut]) -> str:
    """Return the content of sweep.json."""
    found = summaries(rows)
    fastest, roomiest = _best(found)
    value = {
        "model": config.model, "dtype": config.dtype, "device": device, "tolerance": TOLERANCE,
        "fastest": _record(fastest), "largest_budget": _record(roomiest),
        "layouts": [
            {
                "layout": item.layout, "largest_budget": _record(item.largest), "fastest": _record(item.fastest),
                "beyond": None if item.beyond is None else {
                    "max_tokens": item.beyond.max_tokens, "status": item.beyond.status, "reason": item.beyond.reason,
                },
            }
            for item in found
        ],
        "invalid": [{"layout": item.what, "status": "invalid", "reason": item.reason} for item in invalid],
    }  # fmt: skip
    return json.dumps(value, indent=1) + "\n"


def _record(row: SweepRow | None) -> Mapping[str, Any] | None:
    if row is None:
        return None
    return {
        "layout": row.layout, "knobs": knobs_of(row), "max_tokens": row.max_tokens, "tokens_per_s": row.tokens_per_s,
        "step_s": row.step_s, "peak_bytes": row.peak_bytes, "reserved_bytes": row.reserved_bytes,
    }  # fmt: skip


def table(device: str, rows: Sequence[SweepRow]) -> str:
    """Return a table with a line per layout."""
    shown = []
    for item in summaries(rows):
        fastest, beyond = item.fastest, item.beyond
        next_larger = "not tried" if beyond is None else f"{beyond.max_tokens:,} {beyond.status}"
        best = ("-", "-") if fastest is None else (f"{fastest.max_tokens:,}", f"{speed(fastest):,.0f}")
        shown.append((item.layout, *_cells(item.largest), next_larger, *best))
    return framed(
        ("layout", "largest", "step", "tokens/s", "peak", "next larger", "fastest at", "tokens/s"), shown,
        left=("layout", "next larger"), least=140,
        above=f"Largest budget of a micro-batch and fastest step of each layout on {device}",
    )  # fmt: skip


def _cells(row: SweepRow | None) -> tuple[str, str, str, str]:
    if row is None or row.step_s is None or row.peak_bytes is None:
        return "none", "-", "-", "-"
    return f"{row.max_tokens:,}", f"{row.step_s:.3g} s", f"{speed(row):,.0f}", f"{row.peak_bytes / 2**30:.2f} GiB"


def answer(rows: Sequence[SweepRow]) -> str:
    """Return the lines that name the fastest layout and the largest budget, each as knobs of a training run."""
    fastest, largest = _best(summaries(rows))
    if fastest is None or largest is None:
        return ""
    return (
        f"fastest: {speed(fastest):,.0f} tokens/s with {words_of(fastest)}\n"
        f"largest budget: {largest.max_tokens:,} tokens, {speed(largest):,.0f} tokens/s with {words_of(largest)}\n"
    )


TOLERANCE = 0.1
"""Distance, as a share of the largest budget that ran, from which on the next larger one is not looked for."""
GROWTH = 4
"""Factor between budgets until one does not run. With 2, a search took two or three trials more on 80 or 141 GB."""


def next_budget(tried: Mapping[int, bool], *, least: int, most: int, multiple: int) -> int | None:
    """Return the budget to try next, or None where the largest is known.

    Args:
        tried: budget -> whether it ran.
        least: first budget, a multiple of `multiple`; if it does not run, nothing smaller is tried.
        most: greatest budget.
        multiple: divisor of all budgets.
    """
    runs = max((budget for budget, ran in tried.items() if ran), default=0)
    fails = min((budget for budget, ran in tried.items() if not ran), default=0)
    if not runs:
        return None if fails else least
    greatest = max(most // multiple * multiple, least)
    if not fails:
        return min(GROWTH * runs, greatest) if runs < greatest else None
    if fails - runs <= max(TOLERANCE * runs, multiple):
        return None
    return (runs + fails) // 2 // multiple * multiple


def page(title: str, rows: Sequence[SweepRow]) -> str:
    """Return the page: tokens a second and peak of memory of each layout against the budget, the fastest first."""
    cards = tuple(_card(item, rows) for item in summaries(rows))
    reasons = tuple(answer(rows).splitlines())
    return html(
        Page(
            title=f"sweep of {title}", decision="PASS" if reasons else "FAIL", reasons=reasons,
            summary=f"{len(rows):,} trials of {len(cards):,} layouts", groups={"layouts": cards},
        )
    )  # fmt: skip


def _card(item: LayoutSummary, rows: Sequence[SweepRow]) -> Card:
    own = sorted((row for row in rows if row.layout == item.layout), key=lambda row: row.max_tokens)
    names = {math.log2(row.max_tokens): f"{row.max_tokens:,}" for row in own}

    def chart(unit: str, value: Callable[[SweepRow], float | None]) -> Chart:
        known = [(row.status == "ok", (math.log2(row.max_tokens), y)) for row in own if (y := value(row)) is not None]
        ran, stopped = (tuple(point for ok, point in known if ok is kind) for kind in (True, False))
        series = Series(name="ran", points=ran), Series(name="did not run", points=stopped, kind="dots", colour=4)
        return Chart(title=unit, x="tokens of a micro-batch", y=unit, names=names, series=series)

    peak = chart("peak of a rank, GiB", lambda row: None if row.peak_bytes is None else row.peak_bytes / 2**30)
    facts = [(f"{row.max_tokens:,} tokens, {row.status}", row.reason) for row in own if row.status != "ok"]
    return Card(
        title=item.layout, verdict="PASS" if item.fastest else "FAIL", note=f"{speed(item.fastest):,.0f} tokens/s",
        facts=tuple(facts), charts=(chart("tokens/s", speed), peak),
    )  # fmt: skip
