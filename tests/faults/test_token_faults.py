"""Bugs of the token path, without an engine: each is caught, in its own stage, and healed; a few of them by default."""

from __future__ import annotations

from dataclasses import replace

import pytest

from verifier.core.stage import Stage
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import NO_ENGINE, Fault
from verifier.faults.matrix import line_of
from verifier.faults.trial import Trials

STAGES = (Stage.PACK, Stage.REPLAY, Stage.LOGPROB, Stage.LOSS)
FAULTS = sorted(
    (fault for fault in CATALOG.values() if fault.stage in STAGES and fault.engine == NO_ENGINE),
    key=lambda fault: (fault.model, fault.mesh.label()),
)
ALWAYS = ("labels-rolled-in-the-shard", "local-positions", "mean-of-means", "routes-count-dense-layers")
"""One of each stage."""


def _passes(trials: Trials, fault: Fault) -> None:
    result = trials.trial(fault)
    assert not result.failures, line_of(result)
    assert not result.crashed, line_of(result)


@pytest.mark.parametrize("fault", [f for f in FAULTS if f.id in ALWAYS], ids=lambda fault: fault.id)
def test_fault_is_caught_where_it_sits(trials: Trials, fault: Fault) -> None:
    _passes(trials, fault)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", [f for f in FAULTS if f.id not in ALWAYS], ids=lambda fault: fault.id)
def test_every_other_fault_too(trials: Trials, fault: Fault) -> None:
    _passes(trials, fault)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "model"), [("mean-of-means", "tiny:mistral"), ("sequence-parallel-grads-not-reduced", "tiny:glm4_moe")]
)
def test_a_model_with_a_derived_layout_shows_it_too(trials: Trials, name: str, model: str) -> None:
    _passes(trials, replace(CATALOG[name], model=model, engine=NO_ENGINE))


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["gates-not-normalised", "router-takes-no-routes"])
def test_a_wrong_router_is_caught_in_bf16_too(trials: Trials, name: str) -> None:
    """There transformers computes an update's gradient under the experts that the trainer's routers chose."""
    _passes(trials, replace(CATALOG[name], dtype="bfloat16"))


def test_one_of_each_stage_always_runs() -> None:
    assert {fault.stage for fault in FAULTS if fault.id in ALWAYS} == set(STAGES)
