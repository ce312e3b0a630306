"""The table of docs/upstream.md: `python -m tests.meta.upgrades` draws it from golden/upgrades."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.meta.sources import ROOT

PAGE = ROOT / "docs" / "upstream.md"
REPORTS = ROOT / "golden" / "upgrades"
_TABLE = re.compile(r"(<!-- table: upgrades -->\n).*?(<!-- table: end -->)", re.DOTALL)


def table() -> str:
    """One row per report."""
    rows = [_row(json.loads(path.read_text(encoding="utf-8"))) for path in sorted(REPORTS.glob("*.json"))]
    head = [
        "| upgrade | model | other packages | contracts | gate | verdicts that changed |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    return "\n".join([*head, *rows]) + "\n"


def _row(report: dict[str, Any]) -> str:
    names = {item.partition("==")[0] for item in report["asked"]}
    others = [
        f"{name} {before} to {after}" for name, (before, after) in report["packages"].items() if name not in names
    ]
    moved = [_moved(item) for item in report["contracts"]]
    before, after = report["gate"]["decision"]
    changed = [
        f"{item['check'] or item['cell']} {item['before']} to {item['after']}" for item in report["gate"]["verdicts"]
    ]
    cells = [
        ", ".join(f"{name} {report['packages'][name][0]} to {report['packages'][name][1]}" for name in sorted(names)),
        report["model"], str(len(others)), _first(moved) or "none moved", f"{before} before, {after} after",
        _first(changed) or "none",
    ]  # fmt: skip
    return f"| {' | '.join(cells)} |"


def _first(moved: list[str], most: int = 3) -> str:
    further = [f"{len(moved) - most} more"] if len(moved) > most else []
    return "; ".join([*moved[:most], *further])


def _moved(item: dict[str, Any]) -> str:
    if item["bug"] and not item["holds"] and not item["untrue"]:
        return f"{item['bug']} cannot be looked for"
    if item["bug"]:
        return f"{item['bug']} {'is found' if item['holds'] else 'is not found any more'}"
    return f"`{item['name']}` {'holds now' if item['holds'] else 'moved'}"


def drawn(page: str) -> str:
    """The page's text with its table drawn anew."""
    return _TABLE.sub(lambda found: found[1] + table() + found[2], page)


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
