"""Tokens behind the same tokens count once in a mean and a median, and their number once in how far these scatter."""

from __future__ import annotations

import math

import numpy as np
import pytest

from verifier.core.manifest import Manifest
from verifier.core.record import Record
from verifier.core.trace import Trace
from verifier.stages.logprob.checks_logprobs import counted_once, repeated_tokens, tokens_apart
from verifier.stages.logprob.records import DtypeNoise, OracleLogprobs, StoredFloor
from verifier.stages.rollout.checks_samples import engine_logprob_differs_from_oracle
from verifier.stages.rollout.records import EngineLogprobs, SampledTokens

LENGTHS = (60, 60, 60)
FIRST, OTHER = tuple(range(57)), tuple(range(100, 157))
SAMPLED = SampledTokens(
    name="next turn", version=3, lengths=(4, 4, 4), prompts=(FIRST, FIRST, OTHER),
    tokens=((60, 61, 62, 63), (60, 61, 72, 73), (60, 61, 62, 63)), stops=((),) * 3, limits=(4,) * 3,
    ended=("length",) * 3, temperatures=(1.0,) * 3,
)  # fmt: skip
"""Two answers to one prompt, which begin alike, and one to another."""
ENGINE = EngineLogprobs(name="next turn", version=3, lengths=LENGTHS, array="engine")
NOISE = DtypeNoise(name="next turn", version=3, greatest=0.5, mean=0.02, deviation=0.02)
FLOOR = StoredFloor(
    name="floor", longest=64, mean=0.02, deviation=0.02, median=0.01, greatest=0.5, stored="floor", tokens=100,
    p90=0.0, p99=0.0,
)  # fmt: skip


def trace(gaps: np.ndarray, *more: Record) -> Trace:
    oracle = OracleLogprobs(name="next turn", version=3, lengths=LENGTHS, whole=(61,) * 3, array="oracle")
    exact = np.linspace(-6.1, -5.9, sum(LENGTHS))
    arrays = {"oracle": exact, "engine": exact + gaps}
    return Trace(
        Manifest(dtype="bfloat16", complete=True), [oracle, ENGINE, SAMPLED, *more], lambda key: {"array": arrays[key]}
    )


def compared(run: Trace) -> dict[str, float]:
    """Each statistic and what is allowed, by its name: the words of the sentence are not asked for."""
    found = {item.what: item for item in engine_logprob_differs_from_oracle(run) if "me" in item.what[-6:]}
    return {name: float(item.allowed.split()[0]) for name, item in found.items()}


def test_a_token_behind_the_same_tokens_is_the_same_one() -> None:
    numbers = repeated_tokens(trace(np.zeros(180)), ENGINE, LENGTHS)
    assert numbers[:58].tolist() == numbers[60:118].tolist()  # 56 of the prompt and two of the answer
    assert len(np.unique(numbers)) == 60 + 2 + 60
    assert counted_once(np.arange(180.0), numbers)[numbers[3]] == (3 + 63) / 2


def test_of_what_was_sampled_the_last_tokens_count() -> None:
    numbers = repeated_tokens(trace(np.zeros(180)), SAMPLED, SAMPLED.lengths)
    assert len(numbers) == 12
    assert len(np.unique(numbers)) == 4 + 2 + 4


def test_samples_of_one_prompt_scatter_as_its_longest() -> None:
    assert tokens_apart(SAMPLED, (4, 3, 4)) == 4 + 4
    assert tokens_apart(ENGINE, LENGTHS) == sum(LENGTHS)


def test_all_tokens_differ_where_nobody_says_which_they_are() -> None:
    unknown = EngineLogprobs(name="scored", version=3, lengths=LENGTHS, array="engine")
    assert repeated_tokens(trace(np.zeros(180)), unknown, LENGTHS).tolist() == list(range(180))


@pytest.mark.parametrize(
    ("stored", "num_tokens"), [((FLOOR,), 122), ((), 180)], ids=["against-a-floor", "against-their-own-noise"]
)
def test_against_a_floor_the_standard_error_is_that_of_different_tokens(
    stored: tuple[Record, ...], num_tokens: int
) -> None:
    """Clean on an H100: 494 tokens, scored 1,214 times, had a median of 0.0520 nats; 0.0522 is allowed of 494."""
    found = compared(trace(np.zeros(180), NOISE, *stored))
    allowed = {"mean": 0.04, "median": 0.02} if stored else {"mean": 0.04}
    expected = {f"next turn {name}": value + 9.8 * 0.02 / math.sqrt(num_tokens) for name, value in allowed.items()}
    assert found == pytest.approx(expected, rel=5e-3)


def test_a_median_is_that_of_different_tokens_and_sees_them_all() -> None:
    gaps = np.concatenate([np.full(120, 0.05), np.zeros(60)])  # 120 of 180 tokens, and 62 of 122
    large = np.concatenate([np.full(58, 0.0), np.zeros(2), np.full(58, 0.09), np.zeros(2), np.full(60, 0.05)])
    for run in (gaps, large):
        bad = {item.what for item in engine_logprob_differs_from_oracle(trace(run, NOISE, FLOOR)) if not item.same}
        assert "next turn median" in bad
    once = np.concatenate([np.full(118, 0.05), np.zeros(62)])  # 118 of 180 tokens, and 60 of 122
    bad = {item.what for item in engine_logprob_differs_from_oracle(trace(once, NOISE, FLOOR)) if not item.same}
    assert "next turn median" not in bad
