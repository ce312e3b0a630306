"""Clean runs in docs/measurements.md: `python -m tests.meta.measurement_tables` draws them from ledgers in golden/."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LEDGER = ROOT / "golden" / "clean-runs.json"
"""What `pytest -m slow tests/dist/test_clean_runs.py` measured: command, commit and one record per run."""
TRAINING = ROOT / "golden" / "clean-training-runs.json"
"""The same of `pytest -m slow tests/dist/test_train_clean.py`."""
SECOND = ROOT / "golden" / "sets" / "vllm-0.22.json"
"""What `tests.dist.clean_sets` measured in the verified set of that name."""
GAPS = {
    "trainer_nats": "trainer - oracle, nats",
    "engine_nats": "engine - oracle, nats",
    "sampled_nats": "sampled - oracle, nats",
    "gradient_gap": "gradient gap",
    "step_gap": "step gap",
}
"""Key of a round trip's record -> head of its column; of several runs the greatest."""
OF_TRAINING = {
    "gradient_gap": "gradient gap",
    "trainer_nats": "trainer - oracle, nats",
    "engine_nats": "trainer - engine, nats",
}


def round_trips() -> str:
    """Markdown: a row for each family, dtype, engine and verified set."""
    sets = (("vllm-0.21", LEDGER, "rows"), ("vllm-0.22", SECOND, "runs"))
    return _table(sets, ("family", "dtype", "engine"), lambda row: (row["family"], row["dtype"], row["engine"]), GAPS)


def training() -> str:
    """Markdown: a row for each kind of training run, dtype and verified set."""
    sets = (("vllm-0.21", TRAINING, "rows"), ("vllm-0.22", SECOND, "training"))
    return _table(sets, ("kind", "dtype"), _kind, OF_TRAINING)


def _kind(row: Mapping[str, Any]) -> tuple[str, ...]:
    first = row["run"].split()[0]
    kind = {"sft": "fine-tuning", "live": "GRPO with a live engine"}.get(first, "GRPO on recorded rollouts")
    return kind, "bfloat16" if "bf16" in row["run"].split() else "float32"


def _table(
    sets: Sequence[tuple[str, Path, str]],
    titles: Sequence[str],
    key_of: Callable[[Mapping[str, Any]], tuple[str, ...]],
    gaps: Mapping[str, str],
) -> str:
    heads = ["verified set", *titles, "runs", *gaps.values(), "compared"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for name, ledger, key in sets:
        groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
        for row in json.loads(ledger.read_text())[key]:
            groups.setdefault(key_of(row), []).append(row)
        for group, rows in sorted(groups.items()):
            greatest = (max((row[gap] for row in rows if row[gap] is not None), default=None) for gap in gaps)
            cells = ["" if value is None else f"{value:.1e}" for value in greatest]
            compared = f"{sum(row['num_compared'] for row in rows):,}"
            lines.append("| " + " | ".join([name, *group, str(len(rows)), *cells, compared]) + " |")
    return "\n".join(lines) + "\n"


def write(rows: list[dict[str, Any]], ledger: Path = LEDGER, test: str = "tests/dist/test_clean_runs.py") -> None:
    """Replace a ledger by these rows, which a test measured at the commit that is checked out."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=60
    ).stdout.strip()
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    head = f' "command": "pytest -m slow {test}",\n "commit": "{commit}"'
    ledger.write_text(f'{{\n{head},\n "rows": [\n{lines}\n ]\n}}\n')
