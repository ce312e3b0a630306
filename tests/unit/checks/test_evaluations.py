"""Answers of an evaluation by LGP015: their version, their log-probabilities, and how far from greedy they are.

What this does not exercise: real runs (tests/dist/test_train_clean.py), and bugs that LGP015 catches (tests/faults).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.oracle.oracle import Sides
from verifier.oracle.recording import sampled_noise
from verifier.stages.rollout.checks_engine_mismatch import evaluation_by_other_policy
from verifier.stages.rollout.records import EvaluatedAnswers
from verifier.stages.train.records import PreviousStep
from verifier.trainer.evaluation import PROBLEMS, places

MASK = np.array([False, True, True, False, True, True])
TOKENS = np.array([5, 6, 9, 5, 6, 7])
"""The first answer has its end token, the second is as long as is allowed."""
NATS = np.array([np.nan, -0.5, -2.0, np.nan, -0.25, -1.0], np.float32)


def wrong(
    temperature: float = 1.0, claimed: int = 3, dtype: str = "float32", shaped: Any = None, config: Any = None,
    sent: int | None = 3, seeds: Any = (), weights: tuple[int, ...] = (), updated: bool = True, noise: Any = None,
    **changed: Any,
) -> list[str]:  # fmt: skip
    """What is wrong with an answer `a` at a temperature and a greedy one `b`; `changed` has columns of other values."""
    short = np.where(np.arange(6) > 3, 0.0, np.nan).astype(np.float32)
    arrays = {"tokens": TOKENS, "mask": MASK, "engine": NATS, "trainer": NATS, "shortfall": short} | changed
    record = EvaluatedAnswers(
        name="held-out problems", version=3, claimed=claimed, temperature=temperature, ids=("a", "b"), lengths=(3, 3),
        greedy=(False, True), max_answer_tokens=2, end=9, other_ends=(8,), array="all", shaped=shaped, sent=sent,
        seeds=seeds, weights=weights,
    )  # fmt: skip
    before = PreviousStep(name="step", version=3, updated=updated, here=False)
    config = {"seed": 2, "grpo": {"max_turns": 2}} | (config or {})
    trace = Trace(
        Manifest(dtype=dtype, model="tiny:add", complete=True, config=config),
        [record, before, *([noise] if noise else [])],
        {"all": arrays}.__getitem__,
    )
    return [item.what for item in evaluation_by_other_policy(trace) if not item.same]


def test_an_evaluation_is_of_the_weights_that_its_engines_held():
    assert wrong(weights=(3,)) == []
    assert wrong(weights=(2,), dtype="bfloat16") == ["weights 2"]
    assert wrong(weights=(2,), sent=2) == ["weights 2"]  # asked before the sync
    assert wrong(weights=(2, 3)) == ["weights 2"]
    assert wrong(weights=(2,), sent=2, updated=False) == []
    assert wrong(weights=(3,), sent=2, updated=False) == ["weights 3"]


def off(at: int, by: float, values: np.ndarray = NATS) -> np.ndarray:
    return values + np.where(np.arange(6) == at, by, 0.0).astype(np.float32)


def test_right_answers_hold_and_another_version_does_not():
    assert wrong() == []
    assert wrong(claimed=2) == ["version"]


def test_a_log_probability_of_other_weights_is_named_with_its_answer():
    assert wrong(engine=off(2, 1e-3)) == ["a"]
    assert wrong(engine=off(4, -1e-3)) == ["b"]
    assert wrong(engine=off(4, float("nan"))) == ["b"]


def test_a_temperature_below_one_widens_the_bound_of_drawn_answers_alone():
    assert wrong(temperature=0.5, engine=off(1, 1.5e-4)) == []
    assert wrong(engine=off(1, 1.5e-4)) == ["a"]
    assert wrong(temperature=0.5, engine=off(5, 1.5e-4)) == ["b"]


@pytest.mark.parametrize(("short", "found"), [(1.5e-4, []), (3e-4, ["b, greedy"]), (float("inf"), ["b, greedy"])])
def test_a_greedy_token_may_be_as_far_below_the_greatest_logit_as_two_log_probabilities_err(short, found):
    assert wrong(shortfall=np.where(np.arange(6) == 5, short, 0.0).astype(np.float32)) == found


@pytest.mark.parametrize(
    ("temperature", "sampled", "greedy", "found"),
    [
        (1.0, ("",), ("temperature=0.0",), []),
        (0.5, ("temperature=0.5",), ("temperature=0.0",), []),
        (1.0, ("", "top_k=20"), ("temperature=0.0",), ["requests for sampled answers of the evaluation"]),
        (1.0, ("temperature=0.5",), ("temperature=0.0",), ["requests for sampled answers of the evaluation"]),
        (1.0, ("",), ("repetition_penalty=1.1, temperature=0.0",), ["requests for greedy answers of the evaluation"]),
        (1.0, ("",), ("",), ["requests for greedy answers of the evaluation"]),
    ],
)
def test_knobs_of_an_evaluations_requests_are_those_of_the_run_alone(temperature, sampled, greedy, found):
    assert wrong(temperature=temperature, shaped=(sampled, greedy)) == found


def test_without_a_measured_noise_what_is_exact_is_judged():
    assert wrong(dtype="bfloat16", engine=off(2, 1e-3)) == []
    assert wrong(dtype="bfloat16", claimed=2) == ["version"]
    knobs = wrong(dtype="bfloat16", shaped=(("top_k=20",), ("temperature=0.0",)))
    assert knobs == ["requests for sampled answers of the evaluation"]
    assert wrong(dtype="bfloat16", tokens=np.array([5, 6, 6, 5, 6, 7])[[0, 2, 1, 3, 4, 4]]) == []
    assert wrong(dtype="bfloat16", tokens=np.array([5, 9, 6, 5, 6, 7])) == ["a, its end"]


def test_in_bf16_the_number_of_tokens_beyond_the_measured_noise_is_judged():
    """Chance puts two of four tokens, and one of two greedy ones, beyond the greatest of 100,000."""
    exact = -np.random.default_rng(3).uniform(0.2, 3.0, 100_000)
    rounded = exact + np.random.default_rng(4).normal(0.0, 1e-3, len(exact))
    noise = sampled_noise(3, 2, Sides([exact], [rounded], []))
    far = lambda *at: NATS + np.isin(np.arange(6), at).astype(np.float32)  # noqa: E731
    said = ["number of tokens beyond 3 times the greatest noise"]
    assert wrong(dtype="bfloat16", noise=noise, engine=far(1, 4)) == []
    assert wrong(dtype="bfloat16", noise=noise, engine=far(1, 2, 4)) == said
    assert wrong(dtype="bfloat16", noise=noise, engine=NATS + np.where(np.arange(6) == 2, np.nan, 0)) == said
    below = np.where(np.arange(6) > 3, 0.5, np.nan).astype(np.float32)
    assert wrong(dtype="bfloat16", noise=noise, shortfall=below) == said
    assert wrong(dtype="bfloat16", noise=noise, shortfall=np.where(np.arange(6) == 4, below, 0 * below)) == []


def test_requests_of_an_evaluation_name_the_adapter_of_its_version():
    own, base = ("adapter=version-000003", ""), ("adapter=version-000003, temperature=0.0", "temperature=0.0")
    lora = {"lora": {"rank": 8, "sync": "adapter"}}
    assert wrong(config=lora, shaped=(own[:1], base[:1])) == []
    assert wrong(config=lora, shaped=(own, base[:1])) == ["requests for sampled answers of the evaluation"]
    assert wrong(config=lora, shaped=(own[:1], base[1:])) == ["requests for greedy answers of the evaluation"]
    assert wrong(config=lora, shaped=(("adapter=version-000002",), base[:1])) != []
    before = (("adapter=version-000002",), ("adapter=version-000002, temperature=0.0",))
    assert wrong(config=lora, shaped=before, sent=2, updated=False) == []
    assert len(wrong(config=lora, shaped=before, sent=2)) == 2  # step 3 took an update that nobody sent
    assert wrong(config={"lora": {"rank": 8, "sync": "merged"}}, shaped=(("",), ("temperature=0.0",))) == []


FIRST = 3 * 1_000_003 - 4 * 2 * 3
"""Seed of the first of three problems of version 3, with two turns at most."""


@pytest.mark.parametrize(
    ("seeds", "found"),
    [
        (((0, 1, 2),), []),
        (((0, 1, 2), (3, 5)), []),
        (((0, 0, 0),), ["seeds of the evaluation, turn 0"]),
        (((6, 7, 8),), ["seeds of the evaluation, turn 0"]),  # those of another version
        (((0, 1, 2), (5, 5)), ["seeds of the evaluation, turn 1"]),
        (((0, 1, 2), (0, 2)), ["seeds of the evaluation, turn 1"]),
        ((), []),  # an older trace
    ],
)
def test_each_answer_of_an_evaluation_has_a_seed_of_its_own(seeds, found):
    assert wrong(seeds=tuple(tuple(FIRST + seed for seed in own) for own in seeds)) == found


def test_seeds_of_late_evaluations_go_on_below_zero_from_the_other_end():
    first = 2**62 + 1_000_003 - 4 * 400_000 * 3
    late = {"seed": 0, "grpo": {"max_turns": 400_000}}
    assert wrong(seeds=((first, first + 1, first + 2),), config=late) == []
    assert wrong(seeds=((first - 2**62, first - 2**62 + 1, first - 2**62 + 2),), config=late) != []


@pytest.mark.parametrize("count", [1, 7, 8, 9, 100])
def test_evaluations_keep_answers_to_problems_that_are_spread_and_differ(count):
    found = [places(version, count) for version in range(count)]
    assert all(len(set(own)) == min(PROBLEMS, count) for own in found)
    assert {place for own in found for place in own} == set(range(count))


@pytest.mark.parametrize("count", [16, 512])
def test_kept_problems_are_of_each_engine(count):
    """Two engines of a run answer every other problem each."""
    assert all({place % 2 for place in places(version, count)} == {0, 1} for version in range(100))


def test_kept_problems_differ_at_any_distance_of_evaluations():
    assert len({tuple(places(version, 512)) for version in range(0, 640, 64)}) == 10


@pytest.mark.parametrize(
    ("tokens", "found"),
    [
        ([5, 6, 8, 5, 9, 9], ["b, its end"]),  # another end token of the checkpoint; one that did not end an answer
        ([5, 9, 6, 5, 6, 7], ["a, its end"]),
    ],
)
def test_an_answer_that_runs_on_after_its_end_is_seen(tokens, found):
    assert wrong(tokens=np.array(tokens)) == found


def test_an_answer_that_stops_before_the_limit_or_goes_beyond_it_is_seen():
    mask = np.array([False, True, True, False, True, False])
    assert wrong(mask=mask) == ["b, its end"]
    assert "b, its end" in wrong(mask=np.array([False, True, True, True, True, True]))
