"""Trainer against engine in bf16: which differences of a step its noise allows.

What this does not exercise: real noise (tests/dist/test_train_sampled.py), and bounds in fp32 (tests/snapshots).
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.record import real
from verifier.core.trace import Trace
from verifier.oracle.oracle import Sides
from verifier.oracle.recording import sampled_noise
from verifier.stages.advantage.records import LossColumns, PolicyColumns
from verifier.stages.logprob.checks_logprobs import CHANCE, most_beyond
from verifier.stages.loss.records import LossTerms

NUM = 400
NOISE = 0.01
"""Standard deviation of each side, nats."""


def judged(change, *, num=NUM, measured=1, routed=False, recorded=True, floor=None, temperature=None, more=0.0,
           model="tiny:add", scale=0.0, drawn=False):  # fmt: skip
    """Outcome of LGP009 on a step whose engine says what `change` makes of the exact log-probabilities.

    `floor`: the noise is of tokens that are so unsure, 1 - p, and grows as that does. `temperature`: of a float32 run.
    """
    generator = np.random.default_rng(5)
    exact = -generator.uniform(1.0, 4.0, num)
    noises = generator.normal(0.0, NOISE, (3, num))
    columns = {
        "old": exact + noises[0], "engine": change(exact) + noises[1], "mask": np.ones(num, bool),
        "version": np.ones(num, np.int32),
    }  # fmt: skip
    policy = PolicyColumns(
        name="policy inputs", version=2, ids=("x",), lengths=(num,), ratio_over="old", weight_level="", weight_cap=2.0,
        max_staleness=0, trained_version=1, array="policy-0000-000000",
    )  # fmt: skip
    if floor is not None:
        columns["old"] = exact + noises[0] * unsure(exact)
        columns["engine"] = change(exact) + noises[1] * unsure(exact)
        exact = np.log1p(-floor * generator.uniform(0.5, 1.0, num))
        noises[2] *= unsure(exact)
    noise = sampled_noise(2, measured, Sides([exact], [exact + noises[2]], []), routed=routed)
    noise = replace(noise, greatest_of_run=max(noise.greatest_of_run, real(more), key=float))
    manifest = Manifest(dtype="bfloat16" if temperature is None else "float32", model=model, complete=True)
    noise = replace(noise, scale=scale, coarsest=4 * scale, drawn=drawn)
    if temperature is not None:
        columns["old"], columns["engine"] = exact, change(exact)
    terms = LossTerms(name="loss", version=2, loss="clipped", clip_low=0.2, clip_high=0.2, temperature=temperature or 1)
    trace = Trace(manifest, [policy, terms, noise] if recorded else [policy, terms], lambda item: columns)
    return run_check(REGISTRY["LGP009"], trace)


BEYOND = "number of tokens beyond 3 times the greatest noise"


def unsure(exact):
    return -np.expm1(exact)


def bad(outcome):
    return {item.what for item in outcome.finding.bad} if outcome.finding else set()


@pytest.mark.parametrize("measured", [1, 0])
@pytest.mark.parametrize("routed", [False, True])
def test_noise_of_both_sides_is_allowed(measured, routed):
    assert judged(lambda exact: exact, measured=measured, routed=routed).verdict is Verdict.HOLDS


@pytest.mark.parametrize(
    ("change", "seen"),
    [
        (lambda exact: exact * 1.01, "slope over log-probability"),
        (lambda exact: exact + 0.008, "signed mean"),
        (lambda exact: exact + 0.04 * np.sign(np.sin(np.arange(len(exact)))), "root mean square"),
        (lambda exact: exact + np.where(np.arange(len(exact)) % 8 == 7, 0.5, 0.0), BEYOND),
    ],
    ids=["factor", "shift", "coarser", "one token in eight"],
)
def test_differences_beyond_noise_are_seen(change, seen):
    outcome = judged(change)
    assert outcome.verdict is Verdict.VIOLATED
    assert seen in bad(outcome)


def test_one_token_of_a_mixture_may_be_off_and_not_nan():
    at = lambda value: lambda exact: np.where(np.arange(len(exact)) == 7, value, exact)  # noqa: E731
    assert judged(at(-4.5), routed=True).verdict is Verdict.HOLDS
    assert "x" in bad(judged(at(np.nan), routed=True))
    assert "x" in bad(judged(at(-np.inf), routed=True))


def test_few_tokens_that_are_far_off_are_noise_with_a_long_tail():
    at = lambda exact: np.where(np.arange(len(exact)) < 8, exact + 0.5, exact)  # noqa: E731
    assert BEYOND not in bad(judged(at))


@given(tokens=st.integers(1, 10**6), others=st.integers(100, 10**5))
def test_draws_beyond_the_greatest_of_others(tokens, others):
    """Exact: the first of the combined order to be one of the others comes after k draws with C(n, k) / C(n + m, k)."""
    least = most_beyond(tokens, others) + 1
    chance = math.exp(sum(math.log((tokens - at) / (tokens + others - at)) for at in range(min(least, tokens))))
    assert least > tokens or chance <= CHANCE


def test_noise_that_answers_to_one_prompt_share_counts_once():
    """Four answers to each of 15 prompts of ten tokens, three of them unsure, beside a floor of 16 such prompts."""
    alike, beyond = [], []
    for seed in range(300):
        for together, shares in ((True, alike), (False, beyond)):
            shares.append(max(item.share for item in shared_noise(seed, together=together) if item.share is not None))
    assert max(alike) < 0.5 < max(beyond)


def shared_noise(seed, *, together):
    """Comparisons of a step whose answers to a prompt have the same tokens, by records that tell so or do not."""
    generator = np.random.default_rng(seed)

    def draw(prompts):
        exact = np.log1p(-np.tile([*[1e-3] * 7, *[0.5] * 3], prompts))
        sides = exact + unsure(exact) * generator.standard_t(5, (2, len(exact))) * NOISE
        repeat = lambda row: np.tile(row.reshape(prompts, 1, 10), (1, 4, 1)).ravel()  # noqa: E731
        return [repeat(row) for row in (exact, *sides)]

    exact, rounded, _ = draw(16)
    places = np.tile(np.arange(160).reshape(16, 1, 10), (1, 4, 1)).ravel() if together else None
    noise = sampled_noise(2, 1, Sides([exact], [rounded], []), places)
    _, old, engine = draw(15)
    ids, columns = tuple(f"{at}" for at in range(60)), np.ones(600)
    policy = PolicyColumns(
        name="policy inputs", version=2, ids=ids, lengths=(10,) * 60, ratio_over="old", weight_level="", weight_cap=2.0,
        max_staleness=0, trained_version=1, array="policy-0000-000000",
    )  # fmt: skip
    groups = tuple(f"{at // 4}" if together else f"{at}" for at in range(60))
    loss = LossColumns(
        name="update 1", version=2, aggregation="token_mean", ids=ids, groups=groups, lengths=(10,) * 60, array="loss"
    )
    arrays = {"old": old, "engine": engine, "mask": columns.astype(bool), "version": columns.astype(np.int32)}
    manifest = Manifest(dtype="bfloat16", model="tiny:add", complete=True)
    return REGISTRY["LGP009"].fn(Trace(manifest, [policy, loss, noise], lambda item: arrays))


def test_few_tokens_have_no_statistics():
    assert judged(lambda exact: exact * 1.01, num=50).verdict is Verdict.HOLDS


@pytest.mark.parametrize("floor", [1e-2, 1e-3])
def test_a_floor_of_sure_tokens_says_how_sure_they_are(floor):
    """A sampled step whose answers are all sure gives a floor of 1e-4 and less; unsure tokens come later."""
    assert judged(lambda exact: exact, measured=0, floor=floor).verdict is Verdict.HOLDS
    seen = judged(lambda exact: exact + np.where(np.arange(len(exact)) % 8 == 7, 0.5, 0.0), measured=0, floor=floor)
    assert BEYOND in bad(seen)
    assert "mean magnitude" in bad(judged(lambda exact: exact + 0.05, measured=0, floor=floor))


def test_a_floor_of_few_tokens_says_nothing_of_single_ones():
    at = lambda value: lambda exact: np.where(np.arange(len(exact)) == 7, value, exact)  # noqa: E731
    assert judged(at(-4.5), num=50).verdict is Verdict.HOLDS
    assert "x" in bad(judged(at(np.nan), num=50))


def test_the_greatest_noise_of_earlier_steps_counts():
    at = lambda exact: np.where(np.arange(len(exact)) % 8 == 7, exact + 0.12, exact)  # noqa: E731
    assert BEYOND in bad(judged(at))
    assert BEYOND not in bad(judged(at, more=0.05))


@pytest.mark.parametrize(("temperature", "holds"), [(1.0, False), (0.1, True), (2.0, False)])
def test_a_temperature_below_1_magnifies_what_float32_rounds(temperature, holds):
    change = lambda exact: exact + np.where(np.arange(len(exact)) % 5 == 1, 5e-4, 0.0)  # noqa: E731
    slightly = lambda exact: exact + 5e-5  # noqa: E731
    assert ("x" not in bad(judged(change, temperature=temperature))) == holds
    assert (judged(slightly, temperature=temperature).verdict is Verdict.HOLDS) == holds


def every(by, at=3):
    """Differences that all tokens have, or every third one."""
    return lambda exact: exact + np.where(np.arange(len(exact)) % at == 0, by, 0.0)


@pytest.mark.parametrize(("measured", "times"), [(1, 1), (0, 2)], ids=["own", "carried"])
def test_in_fp32_a_published_model_is_held_against_the_scale_of_its_rounding(measured, times):
    """A clean step of a trained model of 30 layers had nine tenths of its tokens within 1.15e-5 nats."""
    here = {"temperature": 1.0, "model": "/models/trained", "scale": 7e-6, "measured": measured}
    assert judged(every(1.15e-5), **here).verdict is Verdict.HOLDS
    assert judged(every(times * 5e-5), **here).verdict is Verdict.HOLDS
    assert bad(judged(every(times * 6e-5), **here)) == {"90% of the tokens"}
    assert bad(judged(every(times * 3e-4, at=400), **here)) == set()
    assert bad(judged(every(times * 4e-4, at=400), **here)) == {"x"}


def test_in_fp32_random_tokens_before_the_first_step_tell_the_scale():
    here = {"temperature": 1.0, "model": "/models/trained", "scale": 7e-6, "measured": 0, "drawn": True}
    for measured in (0, 1):  # of the step's own version too, as these are other tokens
        assert judged(every(1.1e-4), **here | {"measured": measured}).verdict is Verdict.HOLDS
        assert bad(judged(every(1.2e-4), **here | {"measured": measured})) == {"90% of the tokens"}
    assert bad(judged(every(2.6e-3, at=400), **here)) == set()
    assert bad(judged(every(2.8e-3, at=400), **here)) == {"x"}


def test_in_fp32_without_a_measured_noise_a_published_model_is_judged_ten_times_as_coarsely():
    here = {"temperature": 1.0, "model": "/models/trained"}
    assert judged(every(5e-5), **here).verdict is Verdict.HOLDS
    assert bad(judged(every(2e-4), **here)) == {"90% of the tokens"}
    assert bad(judged(every(2e-3, at=400), **here)) == {"x"}
    assert bad(judged(every(2e-5), temperature=1.0)) == {"90% of the tokens"}  # a tiny one as sharply as ever


def test_a_temperature_below_1_hides_no_other_weights():
    assert "x" in bad(judged(lambda exact: exact + 0.01, temperature=0.1))


def test_without_noise_nothing_is_judged():
    outcome = judged(lambda exact: exact, recorded=False)
    assert outcome.verdict is Verdict.INCONCLUSIVE
    assert "no measured noise of bfloat16" in (outcome.error or "")
