"""Clean runs raise no alarm: every family, over every kind of mesh, exports bitwise and scores as the oracle does.

One of them runs by default. `-m slow` runs them all and writes what they measured to golden/clean-runs.json, from which
`python -m tests.dist.clean_table` draws the table of docs/measurements.md.

What this does not exercise: commands, engines with tensor parallelism and the engine's cold start from the exported
checkpoint (test_roundtrip.py), and 64 ranks (docs/measurements.md has the command).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist import clean_table
from tests.dist.clean_case import EXACT_NATS, Case, Measured, cases, compared, judge, run
from verifier.config import GoldenConfig
from verifier.mesh import Mesh
from verifier.runs.runner import Runner

ALL = cases()


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[Case, Measured]]:
    """What the slow runs measured; written to the ledger when all of them have run."""
    found: dict[Case, Measured] = {}
    yield found
    if len(found) == len(ALL):
        clean_table.write([found[case].row() for case in ALL])


def require_exact(found: Measured) -> None:
    """In float32 trainer, engine and sampler agree with the oracle, before and after every sync."""
    print(found.row())
    if found.case.dtype == "float32":
        assert max(found.trainer_nats, found.engine_nats, found.sampled_nats) <= EXACT_NATS


@pytest.mark.parametrize("mesh", [Mesh(tp=2, pp=2, ep=2), Mesh(tp=8, ep=2)], ids=["pipeline", "more ranks than heads"])
def test_golden_holds(runner: Runner, mesh: Mesh, tmp_path: Path) -> None:
    """The model has four key-value heads."""
    config = GoldenConfig(model="tiny:qwen3-moe", trace=tmp_path / "trace", mesh=mesh)
    assert compared(judge(runner.golden(config)), "WGT004") > 0


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_table_of_clean_runs(runner: Runner, measured: dict[Case, Measured], case: Case, tmp_path: Path) -> None:
    """A run after the last one of its engine ends that engine, so that one is alive at a time."""
    measured[case] = run(runner, case, tmp_path)
    require_exact(measured[case])
    following = ALL[ALL.index(case) + 1 :][:1]
    if [(item.engine, item.family, item.dtype) for item in following] != [(case.engine, case.family, case.dtype)]:
        runner.resources.stop_engines()
