"""Clean training runs raise no alarm: three steps of 78 runs over algorithms, modes, meshes and families.

`-m slow` runs them all and writes what they measured to golden/clean-training-runs.json, from which
`python -m tests.dist.clean_table` draws the table of docs/measurements.md.

What this does not exercise: GPUs, Ray, and longer runs (golden/train has such).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.dist import clean_table
from tests.dist.train_clean_case import RUNS, run


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[str, dict[str, Any]]]:
    """What the runs measured; written to the ledger when all of them have run."""
    found: dict[str, dict[str, Any]] = {}
    yield found
    if len(found) == len(RUNS):
        rows = [found[name] for name in RUNS]
        clean_table.write(rows, clean_table.TRAINING, "tests/dist/test_train_clean.py")


def test_there_are_as_many_runs_as_the_pages_say():
    assert len(RUNS) == 78


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_no_check_raises_an_alarm(name, resources, measured, tmp_path):
    measured[name] = run(resources, name, tmp_path / "run")
