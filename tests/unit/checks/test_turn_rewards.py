"""RWD002 on hand-written episodes: the reward stands on the last turn, and once."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import make_trace
from tests.snapshots.training_traces import training
from verifier.checks.turns import _whole
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.records_policy import Advantages, EpisodeTurns, GivenRewards

IDS = ("a/0", "a/1", "a/2", "b/0")


def judged(rewards, given=(0.0, 0.0, 2.0, 1.0), step_wise=True):
    of_kind = {type(item): item for item in training()}
    turns = replace(
        of_kind[EpisodeTurns], step_wise=step_wise, episodes=("a", "a", "a", "b"), indices=(0, 1, 2, 0),
    )  # fmt: skip
    ids = IDS if step_wise else ("a", "b")
    told = replace(of_kind[GivenRewards], ids=ids, rewards=given, texts=(None,) * len(ids), answers=("7",) * len(ids))
    made = replace(
        of_kind[Advantages], ids=ids, trajectories=tuple(name.partition("/")[0] for name in ids), rewards=rewards,
    )  # fmt: skip
    outcome = run_check(REGISTRY["RWD002"], make_trace([turns, told, made]))
    return outcome.verdict, outcome.finding and outcome.finding.first.what


def test_the_last_turn_alone_has_the_reward():
    assert judged((0.0, 0.0, 2.0, 1.0)) == (Verdict.HOLDS, None)


def test_a_whole_episode_has_what_its_text_was_given():
    assert judged((2.0, 1.0), given=(2.0, 1.0), step_wise=False) == (Verdict.HOLDS, None)
    assert judged((4.0, 1.0), given=(2.0, 1.0), step_wise=False) == (Verdict.VIOLATED, "a")


@pytest.mark.parametrize(
    ("rewards", "given", "first"),
    [
        ((2.0, 2.0, 2.0, 1.0), (2.0, 2.0, 2.0, 1.0), "a/0"),
        ((2.0, 0.0, 0.0, 1.0), (2.0, 0.0, 0.0, 1.0), "a/0"),
        ((0.0, 0.0, 1.0, 1.0), (0.0, 0.0, 2.0, 1.0), "a/2"),
    ],
)
def test_a_reward_on_another_turn_is_seen(rewards, given, first):
    assert judged(rewards, given) == (Verdict.VIOLATED, first)


@pytest.mark.parametrize(("ids", "lost"), [(IDS, 0), (IDS[2:], 1), (IDS[:3], 0), ((*IDS, "b/1"), 1)])
def test_every_turn_of_an_episode_in_the_batch_is_there(ids, lost):
    """DAT006; a whole episode may be absent, as one that dynamic sampling has replaced."""
    of_kind = {type(item): item for item in training()}
    turns = replace(of_kind[EpisodeTurns], step_wise=True, episodes=("a", "a", "a", "b"))
    made = replace(of_kind[Advantages], ids=ids, trajectories=tuple(name.partition("/")[0] for name in ids))
    assert sum(not item.same for item in _whole(turns, made)) == lost
