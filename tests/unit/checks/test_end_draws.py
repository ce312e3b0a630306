"""Ends of answers by LGP014: fair draws hold, answers that were chosen by their length do not, noise is allowed.

What this does not exercise: real runs (tests/dist/train_clean_case.py), and the bug that LGP014 catches (tests/faults).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Outcome, Verdict
from verifier.core.manifest import Manifest
from verifier.core.record import Record
from verifier.core.trace import Trace
from verifier.stages.data.records import SamplingAsked
from verifier.stages.logprob.records import OracleEnds
from verifier.stages.rollout.checks_draws import answers_end_unfairly
from verifier.stages.rollout.records import SampledTokens

LIMIT, END, OTHER = 24, 3, 5
Answer = tuple[tuple[int, ...], np.ndarray]
"""Tokens, and at each the probability that it is an end."""


def drawn(random: np.random.Generator, rate: float, spread: float) -> Answer:
    """One answer of a policy whose chance to end depends on what it drew before."""
    tokens: list[int] = []
    chances: list[float] = []
    while len(tokens) < LIMIT and END not in tokens and OTHER not in tokens:
        chances.append(float(rate ** np.exp(spread * random.normal())))
        tokens.append((END if random.random() < 0.9 else OTHER) if random.random() < chances[-1] else 7)
    return tuple(tokens), np.array(chances)


def outcome(answers: list[Answer], *, noise: float = 0.0, **changed: Any) -> Outcome:
    """LGP014 on the answers of step 2."""
    size = len(answers)
    records: list[Record] = [
        SamplingAsked(
            name="answers", version=2, seed=0, batch_size=1, group_size=size, max_rounds=1, max_turns=1,
            temperature=0.7, max_answer_tokens=LIMIT, end=END, other_ends=(OTHER,), vocab_size=32,
        ),
        SampledTokens(
            name="rollouts", version=1, lengths=tuple(len(tokens) for tokens, _ in answers),
            tokens=tuple(tokens for tokens, _ in answers), prompts=((1,),) * size, stops=((),) * size,
            limits=(LIMIT,) * size, ended=("length",) * size, temperatures=(0.7,) * size, array="sampled",
        ),
        OracleEnds(
            name="rollouts", version=1, temperature=0.7, noise=noise, array="ends",
            **{"ends": (END, OTHER), **changed},
        ),
    ]  # fmt: skip
    arrays = {"ends": {"array": np.concatenate([chances for _, chances in answers])}}
    return run_check(REGISTRY["LGP014"], Trace(Manifest(complete=True), records, arrays.__getitem__))


def kept(answers: list[Answer], sign: int) -> list[Answer]:
    """Of each sixteen answers the eight that are shorter, or longer."""
    groups = [answers[at : at + 16] for at in range(0, len(answers), 16)]
    return [item for group in groups for item in sorted(group, key=lambda item: sign * len(item[0]))[:8]]


@pytest.mark.parametrize("count", [1, 8, 128])
@pytest.mark.parametrize(("rate", "spread"), [(0.05, 0.0), (0.3, 1.0), (1e-4, 0.5), (0.97, 2.0)])
def test_fair_draws_hold(count: int, rate: float, spread: float) -> None:
    for seed in range(60):
        random = np.random.default_rng(seed)
        found = outcome([drawn(random, rate, spread) for _ in range(count)])
        assert (found.verdict, found.num_compared, found.error) == (Verdict.HOLDS, 1, None)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize(("rate", "spread"), [(0.05, 0.0), (0.1, 0.3), (0.3, 0.5)])
def test_a_choice_by_length_shows(sign: int, rate: float, spread: float) -> None:
    for seed in range(10):
        random = np.random.default_rng(seed)
        found = outcome(kept([drawn(random, rate, spread) for _ in range(512)], sign))
        assert found.verdict is Verdict.VIOLATED
        assert found.finding is not None
        assert ("shorter" if sign == 1 else "longer") in found.finding.bad[0].sentence


def test_answers_that_are_all_alike_leave_no_choice() -> None:
    sure: Answer = ((7, 7, END), np.array([0.0, 0.0, 1.0]))
    assert outcome([sure] * 200).verdict is Verdict.HOLDS


def test_what_the_dtype_costs_is_allowed_three_times() -> None:
    random = np.random.default_rng(1)
    answers = kept([drawn(random, 0.05, 0.0) for _ in range(256)], 1)
    assert outcome(answers, noise=1.0).verdict is Verdict.VIOLATED
    assert outcome(answers, noise=100.0).verdict is Verdict.HOLDS


def test_evidence_of_other_tokens_is_no_verdict() -> None:
    answers = [drawn(np.random.default_rng(0), 0.1, 0.0)]
    assert "ends at 3" in (outcome(answers, ends=(OTHER,)).error or "")
    tokens, chances = answers[0]
    assert "probabilities" in (outcome([(tokens, chances[:-1])]).error or "")


def test_without_the_oracle_there_is_no_subject() -> None:
    assert [*answers_end_unfairly(Trace(Manifest(complete=True), []))] == []
