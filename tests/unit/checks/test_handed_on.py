"""DAT014 and RWD003 on hand-written steps: answers as the engine gave them, rewards as their process named them.

What this does not exercise: real runs, with several turns and rounds (tests/dist), and bugs (tests/faults).
"""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.training_traces import training
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.records_policy import EpisodeTurns, GivenRewards, PolicyColumns, RequestSeeds, RewardSeals
from verifier.core.records_tokens import Rollouts
from verifier.core.seal import seal_of_array, seal_of_reward
from verifier.core.trace import Trace

VERSIONS = np.array([-1, 0, 0, -1, 1, 1, -1, 0], np.int32)
"""Episode `a` of two turns, with a reply of one token between them, and `b` of one."""
NATS = np.array([np.nan, -1, -2, np.nan, -3, -4, np.nan, -5], np.float32)
TOKENS = np.array([9, 1, 2, 8, 3, 4, 9, 5], np.int64)


def sealed(*places: int) -> tuple[int, int]:
    at = list(places)
    return seal_of_array(TOKENS[at]), seal_of_array(NATS[at])


def judged(
    tokens: np.ndarray = TOKENS, nats: np.ndarray = NATS, versions: np.ndarray = VERSIONS, step_wise: bool = False,
    seals: tuple[tuple[tuple[int, int], ...], ...] = ((sealed(1, 2), sealed(7)), (sealed(4, 5),)),
) -> tuple[Verdict, str, int]:  # fmt: skip
    ids, lengths = (("a/0", "a/1", "b/0"), (3, 3, 2)) if step_wise else (("a", "b"), (6, 2))
    of_kind = {type(item): item for item in training()}
    records = [
        replace(of_kind[RequestSeeds], turns=(), seals=seals, answers=("a", "b")),
        replace(of_kind[EpisodeTurns], episodes=("a", "a", "b"), indices=(0, 1, 0), step_wise=step_wise),
        replace(of_kind[PolicyColumns], ids=ids, lengths=lengths, array="policy"),
        Rollouts(
            name="trained", version=1, ids=ids, groups=("g",) * len(ids), lengths=lengths,
            prompt_lengths=(1,) * len(ids), rewards=(0.0,) * len(ids), array="rollouts",
        ),
    ]  # fmt: skip
    arrays = {"policy": {"version": versions, "engine": nats}, "rollouts": {"versions": versions, "tokens": tokens}}
    outcome = run_check(REGISTRY["DAT014"], Trace(Manifest(), records, arrays.__getitem__))
    first = outcome.finding.first if outcome.finding else None
    return outcome.verdict, first.what if first else "", first.version if first else outcome.num_compared


@pytest.mark.parametrize("step_wise", [False, True])
def test_answers_as_they_came(step_wise):
    assert judged(step_wise=step_wise) == (Verdict.HOLDS, "", 6)


@pytest.mark.parametrize("step_wise", [False, True])
def test_the_version_of_a_finding_is_that_of_the_tokens(step_wise):
    """So that it comes before what other checks say of the same numbers."""
    other = NATS + np.float32(2**-10) * (VERSIONS == 1)
    assert judged(nats=other, step_wise=step_wise) == (Verdict.VIOLATED, "log-probabilities of turn 1 of a", 1)


def test_a_token_is_seen():
    assert judged(tokens=TOKENS + (np.arange(8) == 7)) == (Verdict.VIOLATED, "token ids of b", 0)


def test_replies_are_not_of_the_engine():
    assert judged(tokens=TOKENS + (np.arange(8) == 3))[0] is Verdict.HOLDS


def test_a_reply_that_counts_as_sampled_is_seen():
    assert judged(versions=np.where(np.arange(8) == 3, 0, VERSIONS))[:2] == (Verdict.VIOLATED, "token ids of a")


def test_an_answer_that_nobody_gave_is_seen():
    assert judged(seals=((sealed(1, 2), sealed(7)), ()))[1] == "log-probabilities of turn 1 of a"


def test_without_seals_nothing_is_said():
    """As after a resume of a run that kept none."""
    assert judged(seals=())[0] is Verdict.INCONCLUSIVE


def rewarded(rewards=(2.0, 1.0), known=(("1", "7", 2.0), ("8", "7", 1.0)), name="rewards", texts=("1", "8")):
    given = GivenRewards(
        name=name, version=1, reward="a:b", ids=("x", "y"), texts=texts, answers=("7", "7"), rewards=rewards
    )
    seals = RewardSeals(name="round 0", version=1, seals=tuple(seal_of_reward(*item) for item in known))
    outcome = run_check(REGISTRY["RWD003"], Trace(Manifest(), [given, seals]))
    return outcome.verdict, outcome.num_compared, outcome.finding and outcome.finding.first.what


def test_rewards_as_they_were_given():
    assert rewarded() == (Verdict.HOLDS, 2, None)
    assert rewarded(name="replaced in round 0") == (Verdict.HOLDS, 2, None)
    assert rewarded(texts=("1", None)) == (Verdict.HOLDS, 1, None)


@pytest.mark.parametrize(
    ("rewards", "first"), [((1.0, 2.0), "x"), ((2.0, 2.0), "y"), ((2.0, 0.0), "y"), ((2.0, 1.0 + 2**-52), "y")]
)
def test_other_rewards_are_seen(rewards, first):
    assert rewarded(rewards) == (Verdict.VIOLATED, 2, first)


def test_without_seals_or_of_an_evaluation_nothing_is_said():
    assert rewarded(known=())[0] is Verdict.INCONCLUSIVE
    assert rewarded(name="accuracy")[0] is Verdict.INCONCLUSIVE
