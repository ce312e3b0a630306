"""Estimates of the KL divergence from the reference, per token: k1, k2 and k3, as a loss and as a penalty."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from verifier.errors import UsageError

KL_KINDS = ("k1", "k2", "k3")


def kl_estimate(current: Any, reference: Any, kind: str) -> Any:
    """Estimate KL(current || reference) at tokens that `current` sampled, from d = current - reference, nats.

    | kind | value | gradient by `current` |
    | --- | --- | --- |
    | k1 | d | 1 |
    | k2 | d^2 / 2 | d |
    | k3 | exp(-d) - 1 + d | 1 - exp(-d) |

    Arrays or tensors of one shape; differentiable in tensors, and the gradient is that of the value. As a loss on
    tokens of the current policy, k1 has a gradient whose expectation is 0, k2 one whose expectation is the gradient of
    KL(current || reference), and k3 one whose expectation is that of KL(reference || current). k1 and k3 are unbiased
    in their values. -infinity counts as `FLOOR`; d is kept within `LIMIT` for k3, where it is
    exponentiated.

    Raises:
        UsageError: `kind` is unknown.

    Source:
        Schulman, Approximating KL Divergence (2020), http://joschu.net/blog/kl-approx.html; gradients: Tang and Munos,
        On a few pitfalls in KL divergence gradient estimation for RL (arXiv 2506.09477).
    """
    check_kl_kind(kind)
    d = log_ratio(current, reference)
    if kind == "k1":
        return d
    if kind == "k2":
        return d * d / 2
    d = bounded(d)
    return (np.expm1(-d) if isinstance(d, np.ndarray) else (-d).expm1()) + d


def kl_penalty(
    old: Sequence[np.ndarray], reference: Sequence[np.ndarray], masks: Sequence[np.ndarray], kind: str
) -> np.ndarray:
    """Sum the estimate over the tokens of each rollout: reward - weight * penalty is the reward with the KL in it.

    Args:
        old: [L] log-probabilities of the trainer per rollout, nats.
        reference: [L] log-probabilities of the reference per rollout, nats.
        masks: [L] bool per rollout; the rest may hold anything, NaN too.
        kind: one of `KL_KINDS`.

    Returns:
        [R] float64, nats.

    Raises:
        UsageError: `kind` is unknown.

    Source:
        InstructGPT (arXiv 2203.02155), equation 2, with the whole trajectory's sum at its end.
    """
    check_kl_kind(kind)
    return np.array([
        math.fsum(kl_estimate(np.asarray(own, np.float64)[mask], np.asarray(other, np.float64)[mask], kind))
        for own, other, mask in zip(old, reference, (np.asarray(mask, bool) for mask in masks), strict=True)
    ])  # fmt: skip


def check_kl_kind(kind: str) -> None:
    """Refuse an unknown kind.

    Raises:
        UsageError: lists the known kinds.
    """
    if kind not in KL_KINDS:
        raise UsageError(f"KL estimate `{kind}` is unknown (known: {', '.join(KL_KINDS)})")


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
