"""LGP003 beyond plain samples: those that are counted, and those whose requests ask for more than a temperature."""

from __future__ import annotations

import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Outcome, Verdict
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.stages.logprob.records import DtypeNoise, OracleOfNext, OracleOfSampled, OracleOfShaped
from verifier.stages.rollout.checks_samples import sampled_from_another_distribution
from verifier.stages.rollout.records import DrawnTokens, SampledTokens, ShapedTokens

NEXT = np.log([0.5, 0.25, 0.25])
TOKENS = [2, 0, 1, 0]
ROW = {"lengths": (2,)}
REQUEST = {
    "prompts": ((1,),),
    "tokens": ((1, 2),),
    "stops": ((),),
    "limits": (2,),
    "ended": ("length",),
    "temperatures": (1.0,),
}


def outcome(dtype: str = "float32", **arrays: np.ndarray) -> Outcome:
    """LGP003 on one set of each kind of samples, all right unless an array says otherwise."""
    held = {
        "sampled": np.array([-1.0, -2.5]),
        "shaped": np.array([-0.5, -0.75]),
        "drawn": NEXT[TOKENS],
        **arrays,
    }
    seen = [
        SampledTokens(name="some", role="engine", **ROW, **REQUEST, array="sampled"),
        OracleOfSampled(name="some", role="oracle", **ROW, whole=(5,), array="one"),
        ShapedTokens(name="asked", role="engine", **ROW, **REQUEST, asked=({},), array="shaped"),
        OracleOfShaped(name="asked", role="oracle", **ROW, whole=(5,), array="other"),
        DrawnTokens(name="many", role="engine", prompt=(1,), tokens=tuple(TOKENS), temperature=1.0, array="drawn"),
        OracleOfNext(name="many", role="oracle", array="next"),
    ]
    if dtype != "float32":
        seen.append(DtypeNoise(name="some", greatest=0.01, mean=0.01, deviation=0.0))
    expected = {"one": np.array([-1.0, -2.5]), "other": np.array([-0.5, -0.75]), "next": NEXT}
    return run_check(
        REGISTRY["LGP003"],
        Trace(Manifest(dtype=dtype, complete=True), seen, lambda key: {"array": (held | expected)[key]}),
    )


def test_all_kinds_are_compared() -> None:
    found = outcome()
    assert (found.verdict, found.num_compared, found.error) == (Verdict.HOLDS, 3, None)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        ("drawn", NEXT[[*TOKENS[1:], TOKENS[0]]]),
        ("shaped", np.array([-0.5, -0.7501])),
        ("shaped", np.array([-0.5, -np.inf])),
    ],
)
def test_one_that_is_wrong_shows_in_fp32(kind: str, values: np.ndarray) -> None:
    assert outcome(**{kind: values}).verdict is Verdict.VIOLATED


def test_noise_moves_edges_in_bf16() -> None:
    found = outcome("bfloat16", shaped=np.array([-9.0, -9.0]))
    assert (found.verdict, found.error) == (Verdict.HOLDS, None)


@pytest.mark.parametrize(
    ("dtype", "off", "verdict"),
    [("bfloat16", 1.0, Verdict.HOLDS), ("bfloat16", 0.0, Verdict.VIOLATED), ("float32", 1.0, Verdict.VIOLATED)],
)
def test_noise_of_reports_moves_shares_of_one_next_token_in_bf16(dtype: str, off: float, verdict: Verdict) -> None:
    """160 of 256 draws of a token with a share of 0.43; 0.43 is 0.62 where log-odds are off by 0.8."""
    share = 0.43
    tokens = np.array([0] * 160 + [1] * 96)
    np.random.default_rng(0).shuffle(tokens)
    nats = np.log([share, 1 - share])
    told = {"drawn": nats[tokens] + np.array([off, -off])[tokens], "next": nats}
    seen = [
        DrawnTokens(
            name="many", role="engine", prompt=(1,), tokens=tuple(map(int, tokens)), temperature=1.0, array="drawn",
            bias=((0, 1.0),),
        ),
        OracleOfNext(name="many", role="oracle", array="next"),
    ]  # fmt: skip
    trace = Trace(Manifest(dtype=dtype, complete=True), seen, lambda key: {"array": told[key]})
    _, found, _ = sampled_from_another_distribution(trace)  # the others: ids within the vocabulary, equal draws
    assert found.same == (verdict is Verdict.HOLDS)
