"""Tables of measurements.md and cards.md: ``python -m tests.meta.measurement_tables`` draws them from golden/."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from tests.dist import clean_margins, clean_table
from tests.faults import without_row
from tests.h100 import results
from tests.meta.sources import ROOT
from verifier.campaign.gate.card import Card

PAGE = ROOT / "docs" / "measurements.md"
CARDS_PAGE = ROOT / "docs" / "cards.md"
CARDS = ROOT / "golden" / "cards"
END = "<!-- table: end -->\n"
TRAINING = ROOT / "golden" / "train" / "two-cores.json"
MEASURED = ROOT / "golden" / "measured.json"
"""Tables of what was measured by hand; a cell is text."""
SHOWN = ("golden of 2.08 GB", "gate")


def training() -> str:
    """Markdown: the last whole run of each command that was evaluated; its last step and best evaluation."""
    lines = ["| command | commit | steps | accuracy | `held_out_reward` | s |", "| --- | --- | --- | --- | --- | --- |"]
    whole = {
        row["command"]: row
        for row in json.loads(TRAINING.read_text())["rows"]
        if row.get("accuracy")
        and row.get("judged") == row.get("held") == row.get("steps")
        and "stopped" not in row.get("note", "stopped")
    }
    for command, row in sorted(whole.items()):
        best = [max(row[name].values()) if row.get(name) else None for name in ("accuracy", "held_out_reward")]
        numbers = ["" if value is None else f"{value:.2f}" for value in best]
        seconds = row.get("wall_s", row.get("seconds", ""))
        lines.append(f"| `{command}` | {row['commit']} | {row['steps']} | {' | '.join(numbers)} | {seconds} |")
    return "\n".join(lines) + "\n"


def timings() -> str:
    """Markdown: tables of golden/measured.json, a heading each."""
    tables = json.loads(MEASURED.read_text())["tables"]
    return "\n".join(f"**{name}**\n\n{_table(tables[name])}" for name in SHOWN)


def cards() -> str:
    """Markdown: a line for each card, the newest gate first, and the command of each."""
    found = [(path, msgspec.json.decode(path.read_bytes(), type=Card)) for path in CARDS.glob("*.json")]
    found.sort(key=lambda item: (item[1].ended, item[0]), reverse=True)
    rows = [
        {
            "card": f"[{card.model}](../golden/cards/{path.name})", "ended": card.ended, "decision": card.decision,
            "commit": card.commit, "tier": card.tier, "meshes": ", ".join(card.meshes),
            "dtypes": ", ".join(card.dtypes), "engines": ", ".join(card.engines),
            "runs that hold": f"{[*card.runs.values()].count('holds')} of {len(card.runs)}",
            "compared": f"{sum(card.holds.values()):,}",
            "known to be wrong": "; ".join(
                f"{item.bug.partition(';')[0] or 'no bug is known'}: {', '.join(item.checks) or item.sentence}"
                for item in card.wrong
            ),
            "not judged": "; ".join(card.not_judged),
        }
        for path, card in found
    ]  # fmt: skip
    commands = "".join(f"{card.command}\n" for _, card in found)
    return f"{_table(rows)}\n```text\n{commands}```\n"


def _table(rows: Sequence[Mapping[str, str]]) -> str:
    heads = list(dict.fromkeys(name for row in rows for name in row))
    return "\n".join(_lines(heads, rows)) + "\n"


def _lines(heads: Sequence[str], rows: Sequence[Mapping[str, str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|" + " --- |" * len(heads)
    for row in rows:
        yield f"| {' | '.join(row.get(name, '').replace('|', chr(92) + '|') for name in heads)} |"


def _margins() -> str:
    rows: list[dict[str, Any]] = list(clean_margins.rows_of(clean_margins.LEDGER).values())
    return clean_margins.summary(rows)


TABLES: dict[Path, dict[str, Callable[[], str]]] = {
    CARDS_PAGE: {"cards": cards},
    PAGE: {
        "clean round trips": clean_table.round_trips,
        "clean training runs": clean_table.training,
        "margins": _margins,
        "training": training,
        "faults without a row": lambda: without_row.table(without_row.recorded()),
        "gpu": lambda: results.table(ROOT / "golden" / "gpu") + "\n",
        "timings": timings,
    },
}
"""Page -> name in the page -> its text."""


def drawn(file: Path) -> str:
    """A page with its tables drawn anew."""
    page = file.read_text()
    for name, text in TABLES[file].items():
        begin = f"<!-- table: {name} -->\n"
        head, rest = page.split(begin)
        page = head + begin + text() + END + rest.split(END, maxsplit=1)[1]
    return page


def draw() -> None:
    """Write the pages' tables anew."""
    for file in TABLES:
        file.write_text(drawn(file))


if __name__ == "__main__":
    draw()
