"""Bugs of load, gradient, step and export on models without a row: caught by a derived layout, and healed.

Load faults that are in the derivation too are seen later, by the forward pass against transformers; `Case.seen_in` says
where. The recorded trials are in golden/faults-without-row.json.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.faults.without_row import CASES, Case
from verifier.core.stage import Stage
from verifier.faults.matrix import line_of
from verifier.faults.trial import Trials


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_fault_is_caught_where_the_table_says(trials: Trials, case: Case) -> None:
    result = trials.trial(case.trial)
    assert not result.failures, line_of(result)
    assert not result.crashed, line_of(result)
    if case.in_derivation:
        assert "WGT001" not in result.caught


def test_each_stage_has_its_faults() -> None:
    sits_in = Counter(case.trial.stage for case in CASES if not case.in_derivation)
    assert sum(sits_in.values()) >= 20
    assert set(sits_in) == {Stage.LOAD, Stage.LOSS, Stage.TRAIN, Stage.EXPORT}
    assert len({case.name for case in CASES}) == len(CASES)
