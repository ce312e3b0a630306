"""Faults of the scan of gated delta nets, three of the catalogue and those of `planted`: caught in their stage, healed.

What this does not exercise: flash-linear-attention's kernels, in whose place the CPU tier's stand-in computes.
"""

from __future__ import annotations

import pytest

from tests.faults.planted import INJECTED, PLANTED
from verifier.faults import trial
from verifier.faults.catalog import CATALOG
from verifier.faults.matrix import line_of

SCAN = {name: fault for name, fault in PLANTED.items() if fault.model == "tiny:qwen3_5_text"}
OF_THE_CATALOGUE = (
    "delta-state-crosses-sequences",
    "decay-of-delta-nets-in-bfloat16",
    "gradient-of-the-decay-in-bfloat16",
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", SCAN)
def test_a_fault_of_the_scan_is_caught_in_its_stage(
    name: str, trials: trial.Trials, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "INJECTED", INJECTED)
    result = trials.trial(SCAN[name])
    assert not result.failures, line_of(result)
    assert not result.crashed, line_of(result)


def test_there_are_more_than_fifteen() -> None:
    assert len(SCAN) + len([CATALOG[name] for name in OF_THE_CATALOGUE]) > 15
    assert not SCAN.keys() & CATALOG.keys()
