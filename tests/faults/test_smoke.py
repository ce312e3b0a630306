"""One bug of each room on the trainer's side, on one rank and one engine: caught, in its own stage, and healed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from verifier.faults.catalog import CATALOG
from verifier.faults.matrix import line_of
from verifier.faults.trial import Bench

SMOKE = (
    "expert-left-at-init",
    "norm-epsilon-default",
    "router-rounded-on-the-wire",
)


@pytest.fixture(scope="module")
def bench() -> Iterator[Bench]:
    with Bench(lambda text: print(text, file=sys.stderr, flush=True)) as found:
        yield found


@pytest.mark.parametrize("name", SMOKE)
def test_fault_is_caught_where_it_sits(bench: Bench, name: str) -> None:
    result = bench.trial(CATALOG[name])
    assert not result.failures, line_of(result)
    assert not result.crashed, line_of(result)


@pytest.mark.parametrize("name", SMOKE)
def test_smoke_shares_one_clean_run(name: str) -> None:
    fault, first = CATALOG[name], CATALOG[SMOKE[0]]
    assert (fault.model, fault.mesh, fault.engine, fault.dtype) == (first.model, first.mesh, first.engine, first.dtype)
