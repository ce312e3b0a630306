"""Truncated importance weights (TIS) and masks (MIS) for tokens that the engine sampled and the trainer scored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifier.algorithms.kl import LIMIT, log_ratio
from verifier.errors import UsageError

LEVELS = ("token", "sequence", "geometric")
"""Ratio of a token: its own; the product over its sequence; the geometric mean over its sequence."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CorrectionOptions:
    """Choice of importance weights and masks; by default there are none.

    Raises:
        UsageError: an unknown level, or bounds that exclude everything.
    """

    weight: str | None = None
    """Level of the ratio old / engine that multiplies the advantage; None: 1."""
    cap: float | None = 2.0
    """Greatest weight; None does not truncate."""
    mask: str | None = None
    """Level of the ratio that decides whether a token stays; None: all do."""
    mask_low: float = 0.5
    """Least ratio that stays."""
    mask_high: float = 2.0
    """Greatest ratio that stays."""

    def __post_init__(self) -> None:
        for name, level in (("weight", self.weight), ("mask", self.mask)):
            if level is not None and level not in LEVELS:
                raise UsageError(f"the level of the importance {name} is `{level}` (known: {', '.join(LEVELS)})")
        if self.cap is not None and not 0 < self.cap < math.inf:
            raise UsageError(f"the cap of importance weights is {self.cap}: give a positive number, or none")
        if not 0 <= self.mask_low <= self.mask_high:
            raise UsageError(f"the importance mask keeps ratios from {self.mask_low} to {self.mask_high}: swap them")


def correction(
    ids: Sequence[str],
    old: Sequence[np.ndarray],
    engine: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    options: CorrectionOptions,
) -> list[np.ndarray]:
    """Compute the importance factor of each token from d = old - engine, over the whole batch and by id.

    With ratio = exp(d) by token, exp(sum of d) by sequence, exp(mean of d) by geometric mean, sums and means over the
    tokens of the sequence in the loss mask:

    | name | options | factor |
    | --- | --- | --- |
    | TIS | weight=LEVEL, cap=C | min(ratio, C) |
    | MIS | weight=LEVEL, cap=None, mask=LEVEL | ratio where mask_low <= ratio <= mask_high, else 0 |
    | geometric mask | mask=geometric | 1 where mask_low <= ratio <= mask_high, else 0 |

    A mask looks at ratios that were not truncated. The trainer multiplies the advantage with the factor: every loss of
    `verifier.algorithms.losses` is proportional to the advantage, so this weighs the policy's term and neither KL nor
    entropy. A masked token stays in the denominators of `token_weights`, as 0 stays in a mean.

    Args:
        ids: name of each sequence, for errors.
        old: [L] log-probabilities of the trainer before the step, nats.
        engine: [L] log-probabilities of the engine that sampled, nats.
        masks: [L] bool, True for tokens in the loss; the rest may hold anything.
        options: levels and bounds.

    Returns:
        [L] float64 per sequence: the weight where a token stays, 0 where it was masked and outside of the loss mask.

    Raises:
        UsageError: a log-probability in the mask is NaN or +infinity; names the sequence and the token.

    Source:
        TIS by token: Yao et al., Your Efficient RL Framework Secretly Brings You Off-Policy RL Training (2025). By
        sequence, MIS and geometric masks: Liu et al., When Speed Kills Stability (2025); verl,
        trainer/ppo/rollout_corr_helper.py; SkyRL, utils/off_policy_correction_utils.py.
    """
    factors = []
    for name, own, other, given in zip(ids, old, engine, masks, strict=True):
        mask = np.asarray(given, bool)
        difference = log_ratio(*(
            _checked(np.asarray(values, np.float64), mask, f"rollout `{name}`: the {whose} log-probability")
            for values, whose in ((own, "old"), (other, "engine"))
        ))  # fmt: skip
        weight = _ratio(difference, options.weight)
        if options.weight and options.cap is not None:
            weight = weight.clip(max=options.cap)
        if options.mask:
            judged = _ratio(difference, options.mask)
            weight = np.where((options.mask_low <= judged) & (judged <= options.mask_high), weight, 0.0)
        factors.append(np.zeros(len(mask)))
        factors[-1][mask] = weight
    return factors


def _checked(values: np.ndarray, mask: np.ndarray, what: str) -> np.ndarray:
    """Values in the mask; none is NaN or +infinity."""
    wrong = mask & (np.isnan(values) | (values == math.inf))
    if wrong.any():
        at = int(wrong.argmax())
        raise UsageError(f"{what} of token {at} is {values[at]}: it is in the loss, so it must be a log-probability")
    return values[mask]


def _ratio(difference: np.ndarray, level: str | None) -> np.ndarray:
    """Ratio of each token at a level, its logarithm within `LIMIT` of 0; 1 without a level."""
    if level is None or not len(difference):
        return np.ones(len(difference))
    value = difference
    if level != "token":
        total = math.fsum(difference)
        value = np.full(len(difference), total if level == "sequence" else total / len(difference))
    return np.exp(value.clip(-LIMIT, LIMIT))
