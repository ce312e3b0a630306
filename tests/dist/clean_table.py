"""Table of clean runs: `python -m tests.dist.clean_table` draws docs/clean-runs.md from golden/clean-runs.json."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "golden" / "clean-runs.json"
"""What `pytest -m slow tests/dist/test_clean_runs.py` measured: command, commit and one record per run."""
PAGE = ROOT / "docs" / "clean-runs.md"
BEGIN, END = "<!-- table: clean runs -->\n", "<!-- table: end -->\n"
COLUMNS = {
    "family": "family",
    "mesh": "mesh",
    "dtype": "dtype",
    "engine": "engine",
    "update": "update",
    "num_bitwise": "tensors bitwise",
    "trainer_nats": "trainer - oracle, nats",
    "engine_nats": "engine - oracle, nats",
    "sampled_nats": "sampled - oracle, nats",
    "noise_nats": "noise, nats",
    "gradient_gap": "gradient gap",
    "step_gap": "step gap",
    "num_compared": "compared",
    "golden_s": "golden s",
    "roundtrip_s": "roundtrip s",
}
"""Key of a record -> head of its column."""


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown table with one row per run."""
    lines = ["| " + " | ".join(COLUMNS.values()) + " |", "|" + " --- |" * len(COLUMNS)]
    lines += ["| " + " | ".join(_cell(key, row[key]) for key in COLUMNS) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(key: str, value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if key.startswith("num_"):
        return f"{value:,}"
    return f"{value:.1f}" if key.endswith("_s") else f"{value:.1e}"


def write(rows: list[dict[str, Any]]) -> None:
    """Replace the ledger by these rows, at the commit that is checked out."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = f' "command": "pytest -m slow tests/dist/test_clean_runs.py",\n "commit": "{commit}"'
    LEDGER.write_text(f'{{\n{head},\n "rows": [\n{lines}\n ]\n}}\n')


def drawn(page: str, ledger: Path = LEDGER) -> str:
    """The page's text with its table drawn anew."""
    head, rest = page.split(BEGIN)
    return head + BEGIN + table(json.loads(ledger.read_text())["rows"]) + END + rest.split(END, maxsplit=1)[1]


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
