"""Differences of log-probabilities that are finite, and whose exponentials are."""

from __future__ import annotations

from typing import Any

FLOOR = -1e4
"""Least log-probability, nats; -infinity and all below count as this. exp(-1e4) is 0 in float64 too."""
LIMIT = 20.0
"""Greatest absolute log-ratio, nats, that is exponentiated; exp(20) is 4.9e8.

Source:
    verl, trainer/ppo/core_algos.py `compute_policy_loss_vanilla` (clamp to 20); SkyRL, utils/ppo_utils.py
    `safe_exp_delta`.
"""


def log_ratio(numerator: Any, denominator: Any) -> Any:
    """Return log(numerator) - log(denominator), nats; both finite or -infinity, the result finite.

    Arrays or tensors of one shape. Two of -infinity have ratio 1. The gradient is 0 where `numerator` is below `FLOOR`.
    """
    return numerator.clip(FLOOR) - denominator.clip(FLOOR)


def bounded(value: Any) -> Any:
    """Return log-ratios within `LIMIT` of 0; the gradient is 0 outside."""
    return value.clip(-LIMIT, LIMIT)
