"""Bugs of training runs on a model without a layout row: a derived layout shows them in their own stage, and heals.

What this does not exercise: the whole catalogue, which `verifier faults run` goes over on families with a row.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from verifier.faults.catalog import CATALOG
from verifier.faults.matrix import line_of
from verifier.faults.trial import Trials


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("gradient-of-one-rank", "tiny:mistral"),
        ("moments-zeroed", "tiny:mistral"),
        ("norm-counts-copies-on-every-rank", "tiny:glm4_moe"),
    ],
)
def test_a_model_with_a_derived_layout_shows_it_too(trials: Trials, name: str, model: str) -> None:
    result = trials.trial(replace(CATALOG[name], model=model))
    assert not result.failures, line_of(result)
    assert not result.crashed, line_of(result)
