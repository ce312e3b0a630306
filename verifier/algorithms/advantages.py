"""Advantages of rollouts: GRPO, Dr. GRPO, RLOO and REINFORCE++, over the whole batch and by id.

Shape suffixes: R rollouts, N trajectories.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from verifier.algorithms.registry import advantage, find
from verifier.errors import ContractError, UsageError

Estimator = Callable[[np.ndarray, Sequence[str], np.ndarray | None], np.ndarray]
"""(rewards_N float64, groups, token_counts_N float64 or None) -> [N] advantages; one entry per trajectory."""
EPSILON = 1e-6
"""Added to the standard deviation of a group, in units of the reward.

Source:
    SkyRL, utils/ppo_utils.py `compute_grpo_outcome_advantage`; verl, trainer/ppo/core_algos.py, the same name.
"""
LEAST_VARIANCE = 1e-8
"""Least variance of a batch that REINFORCE++ divides by the root of, in squared units of the reward.

Source:
    OpenRLHF, trainer/ppo_utils/experience_maker.py (`var.clamp(min=1e-8).rsqrt()`).
"""


def advantages(
    rewards: Sequence[float] | np.ndarray,
    groups: Sequence[str],
    estimator: str = "grpo",
    *,
    trajectories: Sequence[str] | None = None,
    token_counts: Sequence[int] | np.ndarray | None = None,
) -> np.ndarray:
    """Compute the advantage of each rollout of a batch.

    The reward of a trajectory is the sum over its steps. Its advantage is computed once and goes to each of its steps
    by id. So neither the order of rollouts nor the interleaving of trajectories matters: sums are rounded once
    (`math.fsum`), and a permuted input gives the permuted result bitwise.

    Args:
        rewards: [R] finite.
        groups: [R] name of each rollout's prompt, or of its group.
        estimator: name of an estimator; plugins register others.
        trajectories: [R] id of the trajectory that a rollout is a step of; None where each rollout is one.
        token_counts: [R] number of tokens in the loss; REINFORCE++ needs it.

    Returns:
        [R] float64.

    Raises:
        UsageError: the estimator is unknown; a reward is not finite; a trajectory is in two groups; a group has one
            trajectory and the estimator compares within groups; a plugin's result is not finite or of another shape.
    """
    given = np.asarray(rewards, np.float64)
    counts = None if token_counts is None else np.asarray(token_counts, np.float64)
    steps = [str(row) for row in range(len(given))] if trajectories is None else list(trajectories)
    for name, values in (("groups", groups), ("trajectories", steps), ("token_counts", counts)):
        if values is not None and len(values) != len(given):
            raise ContractError(f"there are {len(given)} rewards and {len(values)} {name}")
    what = "rollout" if trajectories is None else "trajectory"
    for row in np.flatnonzero(~np.isfinite(given)):
        where = f"{what} `{steps[row]}` in group `{groups[row]}`"
        raise UsageError(f"the reward of {where} is {given[row]}, it must be a number: mend the reward function")
    members = rows_of(steps)
    for trajectory, rows in members.items():
        if len(own := {groups[row] for row in rows}) > 1:
            raise UsageError(f"trajectory `{trajectory}` is in groups {', '.join(f'`{name}`' for name in sorted(own))}")
    value_N = np.asarray(find("advantage", estimator)(
        trajectory_rewards(given, steps), [groups[rows[0]] for rows in members.values()],
        None if counts is None else np.array([counts[rows].sum() for rows in members.values()]),
    ), np.float64)  # fmt: skip
    if value_N.shape != (len(members),) or not np.isfinite(value_N).all():
        raise UsageError(
            f"advantage estimator `{estimator}` must give {len(members)} finite numbers, one per trajectory; its "
            f"result has shape {list(value_N.shape)} and {np.isfinite(value_N).sum()} finite numbers"
        )
    result = np.empty(len(given))
    for value, rows in zip(value_N, members.values(), strict=True):
        result[rows] = value
    return result


def rows_of(names: Sequence[str]) -> dict[str, list[int]]:
    """Return the rows at which each name stands, in the order of their first."""
    found: dict[str, list[int]] = {}
    for row, name in enumerate(names):
        found.setdefault(name, []).append(row)
    return found


def trajectory_rewards(rewards: np.ndarray, trajectories: Sequence[str]) -> np.ndarray:
    """Return the [N] sums of the rewards of each trajectory's steps, in the order in which their ids first appear."""
    return np.array([math.fsum(rewards[rows]) for rows in rows_of(trajectories).values()])


@advantage("grpo")
def grpo(rewards_N: np.ndarray, groups: Sequence[str], token_counts_N: np.ndarray | None = None) -> np.ndarray:
    """Deviation from the group's mean, in standard deviations of the group: (r - mean) / (std + 1e-6).

    The standard deviation is that of a sample (n - 1), as in `torch.std`. Equal rewards have advantage exactly 0.

    Raises:
        UsageError: a group of one.

    Source:
        DeepSeekMath (arXiv 2402.03300), section 4.1.2; epsilon and n - 1 as in SkyRL and verl (`EPSILON`).
    """

    def normalised(own: np.ndarray) -> np.ndarray:
        centred = _centred(own)
        return centred / (math.sqrt(math.fsum(centred**2) / (len(own) - 1)) + EPSILON)

    return _within_groups(rewards_N, groups, "grpo", normalised)


@advantage("dr_grpo")
def dr_grpo(rewards_N: np.ndarray, groups: Sequence[str], token_counts_N: np.ndarray | None = None) -> np.ndarray:
    """Deviation from the group's mean: r - mean.

    Raises:
        UsageError: a group of one, whose advantage would always be 0.

    Source:
        Understanding R1-Zero-Like Training (arXiv 2503.20783), section 3.2.
    """
    return _within_groups(rewards_N, groups, "dr_grpo", _centred)


@advantage("rloo")
def rloo(rewards_N: np.ndarray, groups: Sequence[str], token_counts_N: np.ndarray | None = None) -> np.ndarray:
    """Reward less the mean of the other n - 1 in the group, which equals (r - mean) n / (n - 1).

    Raises:
        UsageError: a group of one, which has no others.

    Source:
        Back to Basics (arXiv 2402.14740), equation 8.
    """
    return _within_groups(rewards_N, groups, "rloo", lambda own: _centred(own) * (len(own) / (len(own) - 1)))


@advantage("reinforce++")
def reinforce_plus_plus(
    rewards_N: np.ndarray, groups: Sequence[str], token_counts_N: np.ndarray | None = None
) -> np.ndarray:
    """Deviation from the batch's mean, in standard deviations of the batch, every token counted once.

    mean = sum(n r) / sum(n), var = sum(n (r - mean)^2) / sum(n), result (r - mean) / sqrt(max(var, 1e-8)), with n the
    tokens of a trajectory in the loss. It is the variant for outcome rewards with discount 1: a KL penalty is
    subtracted from the reward of the whole trajectory beforehand (`verifier.algorithms.kl.kl_penalty`). Groups of any
    size, one included.

    Raises:
        ContractError: no token counts.
        UsageError: no token in the loss.

    Source:
        REINFORCE++ (arXiv 2501.03262v9); OpenRLHF, trainer/ppo_utils/experience_maker.py (mean and variance over the
        action mask of all experiences).
    """
    if token_counts_N is None:
        raise ContractError("REINFORCE++ needs the number of tokens of each rollout")
    if not token_counts_N.sum():
        raise UsageError("no token of any rollout is in the loss: there is no batch to normalise over")
    total = math.fsum(token_counts_N)
    if (rewards_N == rewards_N[0]).all():
        return np.zeros_like(rewards_N)
    centred = rewards_N - math.fsum(token_counts_N * rewards_N) / total
    return centred / math.sqrt(max(math.fsum(token_counts_N * centred**2) / total, LEAST_VARIANCE))


@advantage("reinforce++_baseline")
def reinforce_plus_plus_baseline(
    rewards_N: np.ndarray, groups: Sequence[str], token_counts_N: np.ndarray | None = None
) -> np.ndarray:
    """Deviation from the group's mean, then normalised over the batch as by `reinforce_plus_plus`.

    Raises:
        UsageError: a group of one, or no token in the loss.
        ContractError: no token counts.

    Source:
        REINFORCE++ with baseline (arXiv 2501.03262v9); OpenRLHF, `--advantage_estimator reinforce_baseline`.
    """
    centred = _within_groups(rewards_N, groups, "reinforce++_baseline", _centred)
    return reinforce_plus_plus(centred, groups, token_counts_N)


def _centred(own: np.ndarray) -> np.ndarray:
    """Deviation from the mean; exactly 0 where all are equal, whatever the mean is rounded to."""
    return np.zeros_like(own) if (own == own[0]).all() else own - math.fsum(own) / len(own)


def _within_groups(
    rewards_N: np.ndarray, groups: Sequence[str], estimator: str, value: Callable[[np.ndarray], np.ndarray]
) -> np.ndarray:
    result = np.empty(len(rewards_N))
    for group, rows in rows_of(groups).items():
        if len(rows) == 1:
            raise UsageError(
                f"group `{group}` has one sample, and `{estimator}` compares samples of a group: raise the samples per "
                "prompt to 2, or use `reinforce++`"
            )
        result[rows] = value(rewards_N[rows])
    return result
