"""Every bug of the engine's side and of the rollout, on the real engines: caught, in its own stage, and healed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from verifier.faults import bugs_adapter, bugs_engine, bugs_engine_part, bugs_rollout
from verifier.faults.fault import Fault
from verifier.faults.matrix import line_of
from verifier.faults.trial import Trials

FAULTS = sorted(
    (*bugs_engine.FAULTS, *bugs_engine_part.FAULTS, *bugs_rollout.FAULTS, *bugs_adapter.FAULTS),
    key=lambda fault: (fault.engine, fault.model, fault.engine_tp, fault.lora_rank),
)


@pytest.fixture(scope="module")
def trials() -> Iterator[Trials]:
    with Trials(lambda text: print(text, file=sys.stderr, flush=True)) as found:
        yield found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_fault_is_caught_where_it_sits(trials: Trials, fault: Fault) -> None:
    result = trials.trial(fault)
    assert not result.failures, line_of(result)
    assert not result.crashed, line_of(result)
