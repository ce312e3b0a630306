"""Tables of clean runs: `python -m tests.dist.clean_table` draws docs/clean-runs.md from ledgers in golden/."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "golden" / "clean-runs.json"
"""What `pytest -m slow tests/dist/test_clean_runs.py` measured: command, commit and one record per run."""
PAGE = ROOT / "docs" / "clean-runs.md"
TRAINING = ROOT / "golden" / "clean-training-runs.json"
"""The same of `pytest -m slow tests/dist/test_train_clean.py`."""
END = "<!-- table: end -->\n"
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
OF_TRAINING = {
    "run": "run",
    "gradient_gap": "gradient gap",
    "trainer_nats": "trainer - oracle, nats",
    "engine_nats": "trainer - engine, nats",
    "num_checks": "checks",
    "num_compared": "compared",
    "train_s": "s",
}
SECOND = ROOT / "golden" / "sets" / "vllm-0.22.json"
"""What `tests.dist.clean_sets` measured in the verified set of that name."""
TABLES = {
    "clean runs": (LEDGER, "rows", COLUMNS),
    "clean training runs": (TRAINING, "rows", OF_TRAINING),
    "clean runs of vllm-0.22": (SECOND, "runs", COLUMNS),
    "clean training runs of vllm-0.22": (SECOND, "training", OF_TRAINING),
}
"""Name in the page -> its ledger, the key of its rows, and its columns."""


def table(rows: list[dict[str, Any]], columns: Mapping[str, str] = COLUMNS) -> str:
    """Markdown table with one row per run."""
    lines = ["| " + " | ".join(columns.values()) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_cell(key, row[key]) for key in columns) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _cell(key: str, value: str | float | None) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if key.startswith("num_"):
        return f"{value:,}"
    return f"{value:.1f}" if key.endswith("_s") else f"{value:.1e}"


def write(rows: list[dict[str, Any]], ledger: Path = LEDGER, test: str = "tests/dist/test_clean_runs.py") -> None:
    """Replace a ledger by these rows, which a test measured at the commit that is checked out."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = f' "command": "pytest -m slow {test}",\n "commit": "{commit}"'
    ledger.write_text(f'{{\n{head},\n "rows": [\n{lines}\n ]\n}}\n')


def drawn(page: str) -> str:
    """The page's text with its tables drawn anew."""
    for name, (ledger, key, columns) in TABLES.items():
        begin = f"<!-- table: {name} -->\n"
        head, rest = page.split(begin)
        rows = json.loads(ledger.read_text())[key]
        page = head + begin + table(rows, columns) + END + rest.split(END, maxsplit=1)[1]
    return page


if __name__ == "__main__":
    PAGE.write_text(drawn(PAGE.read_text()))
