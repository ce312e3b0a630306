"""Filters of a batch: which rollouts leave the loss, each with its reason."""

from __future__ import annotations

import enum
from collections.abc import Sequence

import numpy as np

from verifier.algorithms.advantages import rows_of, trajectory_rewards


class DropReason(enum.StrEnum):
    """Reason for which a rollout is not trained on."""

    OVERLONG = "overlong"
    """The answer was cut at the greatest length, so its reward says nothing of how it would have ended."""
    ZERO_VARIANCE = "zero_variance"
    """All samples of its group have one reward, so every advantage within the group is 0."""


def overlong(truncated: Sequence[bool]) -> list[DropReason | None]:
    """Drop answers that were truncated; their rewards stay in the group's advantages.

    Source:
        DAPO (arXiv 2503.14476), section 3.4, overlong filtering.
    """
    return [DropReason.OVERLONG if cut else None for cut in truncated]


def zero_variance(
    rewards: Sequence[float] | np.ndarray, groups: Sequence[str], trajectories: Sequence[str] | None = None
) -> list[DropReason | None]:
    """Drop groups whose rewards are all equal. A group of one has no variance to speak of, and stays.

    Args:
        rewards: [R] finite.
        groups: [R] name of each rollout's group.
        trajectories: [R] id of the trajectory that a rollout is a step of; None where each rollout is one. The reward
            of a trajectory is the sum over its steps.

    Source:
        DAPO (arXiv 2503.14476), section 3.2, dynamic sampling; verl, recipe/dapo (groups of one stay).
    """
    steps = [str(row) for row in range(len(groups))] if trajectories is None else list(trajectories)
    of_trajectory = dict(zip(rows_of(steps), trajectory_rewards(np.asarray(rewards, np.float64), steps), strict=True))
    result: list[DropReason | None] = [None] * len(groups)
    for rows in rows_of(groups).values():
        own = {steps[row]: of_trajectory[steps[row]] for row in rows}
        if len(own) > 1 and len(set(own.values())) == 1:
            for row in rows:
                result[row] = DropReason.ZERO_VARIANCE
    return result


def first_reasons(*filters: Sequence[DropReason | None]) -> list[DropReason | None]:
    """Combine filters: each rollout has the reason of the first filter that drops it."""
    return [next((reason for reason in reasons if reason), None) for reasons in zip(*filters, strict=True)]
