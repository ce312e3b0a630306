"""Faults are caught in their stage where two rollouts of each update are computed too, as they are where all are.

What this does not exercise: faults of every loss and mesh (the kill matrix, on whole steps).
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from verifier.faults.catalog import CATALOG
from verifier.faults.matrix import line_of
from verifier.faults.trial import Trials

RARER = ("entropy-of-other-logits", "router-gradient-of-own-rows", "recomputed-adapters-without-gradient")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["kl-loss-detached", *(pytest.param(name, marks=pytest.mark.slow) for name in RARER)])
def test_some_rollouts_show_it_too(trials: Trials, name: str) -> None:
    fault = CATALOG[name]
    result = trials.trial(replace(fault, training=(*fault.training, "verify.rollouts=2")))
    assert not result.failures, line_of(result)
    assert not result.crashed, line_of(result)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "code"), [("recomputed-adapters-without-gradient", "LSS001"), ("alpha-lost-at-sync", "WGT013")]
)
def test_faults_of_adapters_show_in_bf16_too(trials: Trials, name: str, code: str) -> None:
    fault = CATALOG[name]
    result = trials.trial(replace(fault, training=(*fault.training, "dtype=bf16"), caught_by=(code,)))
    assert not result.failures, line_of(result)
    assert not result.crashed, line_of(result)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_stale_adapter_in_the_engine_shows_in_bf16_too(trials: Trials) -> None:
    result = trials.trial(replace(CATALOG["adapter-of-first-version"], dtype="bfloat16"))
    assert not result.failures, line_of(result)
