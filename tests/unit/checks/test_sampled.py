"""LGP003 beyond plain samples: those that are counted, and those whose requests ask for more than a temperature."""

from __future__ import annotations

import pytest
import torch

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.evidence import Evidence
from verifier.core.finding import Outcome, Verdict
from verifier.core.stage import Stage
from verifier.core.trace import Trace

NEXT = torch.tensor([0.5, 0.25, 0.25]).log()
TOKENS = [2, 0, 1, 0]
ROW = {"lengths": [2], "whole": [5]}


def outcome(dtype: str = "float32", **arrays: torch.Tensor) -> Outcome:
    """LGP003 on one set of each kind of samples, all right unless an array says otherwise."""
    held = {
        "sampled": torch.tensor([-1.0, -2.5]),
        "shaped": torch.tensor([-0.5, -0.75]),
        "drawn": NEXT[TOKENS],
        **arrays,
    }
    seen = [
        Evidence(stage=Stage.ROLLOUT, kind="sampled", name="some", role="engine", facts=ROW, array="sampled"),
        Evidence(stage=Stage.LOGPROB, kind="sampled-oracle", name="some", role="oracle", facts=ROW, array="one"),
        Evidence(stage=Stage.ROLLOUT, kind="shaped", name="asked", role="engine", facts=ROW, array="shaped"),
        Evidence(stage=Stage.LOGPROB, kind="shaped-oracle", name="asked", role="oracle", facts=ROW, array="other"),
        Evidence(
            stage=Stage.ROLLOUT, kind="drawn", name="many", role="engine", facts={"tokens": TOKENS}, array="drawn"
        ),
        Evidence(stage=Stage.LOGPROB, kind="next", name="many", role="oracle", array="next"),
    ]
    if dtype != "float32":
        noise = {"max": 0.01, "mean": 0.01, "deviation": 0.0}
        seen.append(Evidence(stage=Stage.LOGPROB, kind="noise", name="some", facts=noise))
    expected = {"one": torch.tensor([-1.0, -2.5]), "other": torch.tensor([-0.5, -0.75]), "next": NEXT}
    return run_check(REGISTRY["LGP003"], Trace({"dtype": dtype}, seen, (held | expected).__getitem__))


def test_all_kinds_are_compared() -> None:
    found = outcome()
    assert (found.verdict, found.num_compared, found.error) == (Verdict.HOLDS, 3, None)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("drawn", NEXT[[*TOKENS[1:], TOKENS[0]]]),
        ("shaped", torch.tensor([-0.5, -0.7501])),
        ("shaped", torch.tensor([-0.5, -torch.inf])),
    ],
)
def test_one_that_is_wrong_shows_in_fp32(kind: str, values: torch.Tensor) -> None:
    assert outcome(**{kind: values}).verdict is Verdict.VIOLATED


def test_noise_moves_edges_in_bf16() -> None:
    found = outcome("bfloat16", shaped=torch.tensor([-9.0, -9.0]))
    assert (found.verdict, found.error) == (Verdict.HOLDS, None)
