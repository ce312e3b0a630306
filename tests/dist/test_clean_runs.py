"""Clean runs raise no alarm: every family, over every kind of mesh, exports bitwise and scores as the oracle does.

One of them runs by default; `-m slow` runs the whole table and writes it to docs/numerics.md.

What this does not exercise: engines with tensor parallelism and the engine's cold start from the exported checkpoint
(test_roundtrip.py), and 64 ranks (docs/clean-runs.md has the command).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.dist.clean_case import EXACT_NATS, Case, Measured, cases, run, table
from verifier.launch.fork_launcher import ForkLauncher
from verifier.mesh import Mesh
from verifier.runs.runner import Workshop

PAGE = Path(__file__).parents[2] / "docs" / "numerics.md"
BEGIN, END = "<!-- table: begin -->\n", "<!-- table: end -->\n"
DEFAULT = Case(family="qwen3-moe", mesh=Mesh(tp=2, pp=2, ep=2), engine="vllm")
ALL = cases()


@pytest.fixture(scope="module")
def workshop(trainer_launcher: ForkLauncher) -> Iterator[Workshop]:
    with Workshop(print, trainer_launcher) as found:
        yield found


@pytest.fixture(scope="module")
def measured() -> Iterator[dict[Case, Measured]]:
    """What the slow runs measured; written to the page when all of them have run."""
    found: dict[Case, Measured] = {}
    yield found
    if len(found) == len(ALL):
        text = PAGE.read_text()
        head, rest = text.split(BEGIN)
        PAGE.write_text(head + BEGIN + table(found[case] for case in ALL) + END + rest.split(END)[1])


def require_exact(found: Measured) -> None:
    """In float32 trainer, engine and sampler agree with the oracle, before and after every sync."""
    print(table([found]))
    if found.case.dtype == "float32":
        assert max(found.trainer_nats, found.engine_nats, found.sampled_nats) <= EXACT_NATS


def test_clean_run_holds(workshop: Workshop, tmp_path: Path) -> None:
    require_exact(run(workshop, DEFAULT, tmp_path))
    workshop.stop_engines()


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL, ids=lambda case: case.id)
def test_table_of_clean_runs(workshop: Workshop, measured: dict[Case, Measured], case: Case, tmp_path: Path) -> None:
    """A run after the last one of its engine ends that engine, so that one is alive at a time."""
    measured[case] = run(workshop, case, tmp_path)
    require_exact(measured[case])
    following = ALL[ALL.index(case) + 1 :][:1]
    if [(item.engine, item.family, item.dtype) for item in following] != [(case.engine, case.family, case.dtype)]:
        workshop.stop_engines()
