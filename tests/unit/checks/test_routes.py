"""RPL003 names the stage that is wrong: replay only where the trainer is right by its routers' own choice."""

from __future__ import annotations

import pytest
import torch

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.evidence import Evidence
from verifier.core.finding import Verdict
from verifier.core.stage import Stage
from verifier.core.trace import Trace

ROW = {"lengths": [2]}
RIGHT, WRONG = torch.tensor([-1.0, -2.0]), torch.tensor([-1.0, -2.5])
SEEN = [
    Evidence(stage=Stage.REPLAY, kind="forced", name="made up", role="trainer", facts=ROW, array="forced"),
    Evidence(stage=Stage.REPLAY, kind="oracle", name="made up", role="oracle", facts=ROW, array="right"),
    Evidence(stage=Stage.LOGPROB, kind="trainer", name="scored", role="trainer", facts=ROW, array="natural"),
    Evidence(stage=Stage.LOGPROB, kind="oracle", name="scored", role="oracle", facts=ROW, array="right"),
]


@pytest.mark.parametrize(
    ("natural", "stage"), [(RIGHT, Stage.REPLAY), (WRONG, Stage.LOGPROB)], ids=["replay-alone", "both"]
)
def test_the_stage_that_is_wrong_is_named(natural: torch.Tensor, stage: Stage) -> None:
    arrays = {"forced": WRONG, "right": RIGHT, "natural": natural}
    found = run_check(REGISTRY["RPL003"], Trace({"dtype": "float32"}, SEEN, arrays.__getitem__))
    assert found.verdict is Verdict.VIOLATED
    assert found.finding is not None
    assert found.finding.first_bad_stage is stage


def test_both_right_is_silent() -> None:
    arrays = {"forced": RIGHT, "right": RIGHT, "natural": WRONG}
    assert run_check(REGISTRY["RPL003"], Trace({"dtype": "float32"}, SEEN, arrays.__getitem__)).verdict is Verdict.HOLDS
