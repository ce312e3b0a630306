"""RPL003 names the stage that is wrong: replay only where the trainer is right by its routers' own choice."""

from __future__ import annotations

import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.stages.logprob.records import OracleLogprobs, TrainerLogprobs
from verifier.stages.replay.records import ForcedRouteLogprobs, OracleOfForced

ROW = {"lengths": (2,)}
RIGHT, WRONG = np.array([-1.0, -2.0]), np.array([-1.0, -2.5])
SEEN = [
    ForcedRouteLogprobs(name="made up", **ROW, rollouts=("a",), array="forced"),
    OracleOfForced(name="made up", role="oracle", **ROW, array="right"),
    TrainerLogprobs(name="scored", **ROW, array="natural"),
    OracleLogprobs(name="scored", role="oracle", **ROW, array="right"),
]


@pytest.mark.parametrize(
    ("natural", "stage"), [(RIGHT, Stage.REPLAY), (WRONG, Stage.LOGPROB)], ids=["replay-alone", "both"]
)
def test_the_stage_that_is_wrong_is_named(natural: np.ndarray, stage: Stage) -> None:
    arrays = {"forced": WRONG, "right": RIGHT, "natural": natural}
    found = run_check(
        REGISTRY["RPL003"], Trace(Manifest(dtype="float32", complete=True), SEEN, lambda key: {"array": arrays[key]})
    )
    assert found.verdict is Verdict.VIOLATED
    assert found.finding is not None
    assert found.finding.first_bad_stage is stage


def test_both_right_is_silent() -> None:
    arrays = {"forced": RIGHT, "right": RIGHT, "natural": WRONG}
    assert (
        run_check(
            REGISTRY["RPL003"],
            Trace(Manifest(dtype="float32", complete=True), SEEN, lambda key: {"array": arrays[key]}),
        ).verdict
        is Verdict.HOLDS
    )
