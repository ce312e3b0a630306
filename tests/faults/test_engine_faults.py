"""Every bug of the engine, of the rollout and of adapters, on the real engines: caught, in its stage, and healed."""

from __future__ import annotations

import pytest

from verifier.core.stage import Stage
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import Fault
from verifier.faults.matrix import line_of
from verifier.faults.trial import Trials

FAULTS = sorted(
    (
        fault
        for fault in CATALOG.values()
        if not fault.gpus and (fault.stage in (Stage.ENGINE, Stage.ROLLOUT) or fault.lora_rank)
    ),
    key=lambda fault: (fault.engine, fault.model, fault.engine_tp, fault.lora_rank),
)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.id)
def test_fault_is_caught_where_it_sits(trials: Trials, fault: Fault) -> None:
    result = trials.trial(fault)
    assert not result.failures, line_of(result)
    assert not result.crashed, line_of(result)
