"""LSS005: experts that routers chose themselves, within what rounding moves scores by, and within groups."""

from __future__ import annotations

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.stages.loss.records import RouterChoices


def choices(**facts):
    clean = {"name": "update 1", "layer": 3, "shortfall": 0.01, "noise": 0.02, "closed": 0, "closed_in_dtype": 0}
    return RouterChoices(version=1, role="oracle", num_tokens=100, place=(2, 5), **{**clean, **facts})


def judged(*records):
    return run_check(REGISTRY["LSS005"], Trace(Manifest(dtype="bfloat16", complete=True), list(records), {}.get))


@pytest.mark.parametrize(
    ("facts", "holds"),
    [
        ({}, True),
        ({"shortfall": 0.08}, True),  # four times the noise
        ({"shortfall": 0.081}, False),
        ({"closed": 8}, True),
        ({"closed": 9}, False),
        ({"closed": 32, "closed_in_dtype": 5}, False),  # floor(10 + 4 * sqrt(10)) + 8 = 30
        ({"closed": 30, "closed_in_dtype": 5}, True),
    ],
)
def test_bounds(facts, holds):
    assert (judged(choices(**facts)).verdict is Verdict.HOLDS) == holds


def test_the_noise_is_the_greatest_of_the_update():
    assert judged(choices(noise=0.0), choices(layer=4)).verdict is Verdict.HOLDS
    outcome = judged(choices(noise=0.0), choices(layer=4, name="update 2"))
    assert (outcome.verdict, outcome.finding.first.what) == (Verdict.VIOLATED, "layer 3, update 1")


def test_the_sentence_names_layer_token_and_groups():
    finding = judged(choices(shortfall=0.4, closed=20)).finding.first
    assert finding.sentence == (
        "a router of layer 3 chose an expert that scores 0.4 of the scores' range below the best ones, for token 5 of "
        "sequence 2; 20 tokens have one of a group that is closed to them"
    )
