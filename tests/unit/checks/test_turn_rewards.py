"""DAT006 on hand-written episodes: every turn of an episode in the batch is there."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.training_traces import training
from verifier.stages.advantage.records import Advantages
from verifier.stages.data.checks_turns import _whole
from verifier.stages.data.records import EpisodeTurns

IDS = ("a/0", "a/1", "a/2", "b/0")


@pytest.mark.parametrize(("ids", "lost"), [(IDS, 0), (IDS[2:], 1), (IDS[:3], 0), ((*IDS, "b/1"), 1)])
def test_every_turn_of_an_episode_in_the_batch_is_there(ids, lost):
    """A whole episode may be absent, as one that dynamic sampling has replaced."""
    of_kind = {type(item): item for item in training()}
    turns = replace(of_kind[EpisodeTurns], step_wise=True, episodes=("a", "a", "a", "b"))
    made = replace(of_kind[Advantages], ids=ids, trajectories=tuple(name.partition("/")[0] for name in ids))
    assert sum(not item.same for item in _whole(turns, made)) == lost
