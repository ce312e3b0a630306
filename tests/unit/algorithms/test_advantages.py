"""Advantages: groups of one, no variance, unequal groups, steps of trajectories, and what is refused."""

import math

import numpy as np
import pytest

from verifier.algorithms.advantages import advantages
from verifier.algorithms.registry import names
from verifier.errors import ContractError, UsageError

WITHIN_GROUPS = ("grpo", "dr_grpo", "rloo", "reinforce++_baseline")


def test_values_of_two_unequal_groups():
    rewards, groups = [1.0, 0.0, 4.0, 1.0, 1.0], ["a", "b", "b", "a", "b"]
    deviation = math.sqrt(13 / 3)  # of 0, 4, 1 around 5/3, by n - 1
    np.testing.assert_allclose(
        advantages(rewards, groups),
        [0, (-5 / 3) / (deviation + 1e-6), (7 / 3) / (deviation + 1e-6), 0, (-2 / 3) / (deviation + 1e-6)],
        rtol=1e-15,
    )
    np.testing.assert_allclose(advantages(rewards, groups, "dr_grpo"), [0, -5 / 3, 7 / 3, 0, -2 / 3], rtol=1e-15)
    np.testing.assert_allclose(advantages(rewards, groups, "rloo"), [0, -2.5, 3.5, 0, -1], rtol=1e-15)


def test_reinforce_plus_plus_counts_every_token_once():
    got = advantages([1.0, 0.0], ["a", "b"], "reinforce++", token_counts=[1, 3])
    np.testing.assert_allclose(got, [0.75 / math.sqrt(3 / 16), -0.25 / math.sqrt(3 / 16)], rtol=1e-15)


@pytest.mark.parametrize("estimator", names("advantage"))
def test_equal_rewards_have_exactly_no_advantage(estimator):
    """Also where the mean of equal numbers is rounded to another one."""
    got = advantages([0.1] * 3 + [0.7] * 6, ["a"] * 9, estimator, token_counts=[1] * 9)
    assert got.any()
    got = advantages([0.1] * 3, ["a"] * 3, estimator, token_counts=[1] * 3)
    assert (got == 0).all()


@pytest.mark.parametrize("estimator", WITHIN_GROUPS)
def test_a_group_of_one_is_refused_by_name(estimator):
    with pytest.raises(UsageError, match="group `lonely` has one sample"):
        advantages([1.0, 0.0, 1.0], ["a", "a", "lonely"], estimator, token_counts=[1, 1, 1])


def test_two_steps_of_one_trajectory_are_a_group_of_one():
    with pytest.raises(UsageError, match="group `a` has one sample"):
        advantages([1.0, 0.0], ["a", "a"], trajectories=["t", "t"])


def test_reinforce_plus_plus_takes_a_group_of_one():
    assert advantages([1.0, 0.0], ["a", "b"], "reinforce++", token_counts=[2, 2]).tolist() == [1, -1]


def test_interleaved_steps_get_the_advantage_of_their_trajectory():
    """A running sum over last steps gives the second and third rollout here the values of one another."""
    got = advantages([0.0, 0.0, 1.0, 0.0], ["g"] * 4, "dr_grpo", trajectories=["a", "b", "a", "b"])
    assert got.tolist() == [0.5, -0.5, 0.5, -0.5]


def test_a_trajectory_in_two_groups_is_refused():
    with pytest.raises(UsageError, match="trajectory `t` is in groups `a`, `b`"):
        advantages([1.0, 0.0], ["b", "a"], trajectories=["t", "t"])


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_that_is_no_number_is_refused_by_name(reward):
    with pytest.raises(UsageError, match="the reward of trajectory `t7` in group `a` is"):
        advantages([0.0, reward], ["a", "a"], trajectories=["t6", "t7"])


def test_an_unknown_estimator_lists_the_known():
    known = r"known: dr_grpo, grpo, reinforce\+\+, reinforce\+\+_baseline, rloo"
    with pytest.raises(UsageError, match=rf"advantage `gae` is unknown \({known}\)"):
        advantages([0.0, 1.0], ["a", "a"], "gae")


def test_lengths_that_disagree_are_an_error():
    with pytest.raises(ContractError, match="there are 2 rewards and 1 groups"):
        advantages([0.0, 1.0], ["a"])


def test_reinforce_plus_plus_needs_tokens():
    with pytest.raises(ContractError, match="needs the number of tokens"):
        advantages([0.0, 1.0], ["a", "a"], "reinforce++")
    with pytest.raises(UsageError, match="no token of any rollout"):
        advantages([0.0, 1.0], ["a", "a"], "reinforce++", token_counts=[0, 0])
