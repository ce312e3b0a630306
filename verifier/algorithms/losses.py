"""Losses per token: clipped, GSPO, CISPO, importance sampling and cross-entropy, with KL and entropy.

Shape suffix: T rows of one micro-batch, or of one context-parallel shard of it.
"""

# ruff: noqa: N815 - field names carry shape suffixes

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from verifier.algorithms.kl import FLOOR, LIMIT, bounded, kl_estimate, log_ratio
from verifier.algorithms.registry import LossOptions, check_loss, find, loss


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """Rows of a micro-batch. Outside of the mask every field may hold anything, NaN and infinity too."""

    current_T: torch.Tensor
    """[T] log-probabilities of the weights that are trained, nats; differentiable."""
    entropy_T: torch.Tensor
    """[T] entropies, nats; differentiable."""
    divisor_T: torch.Tensor
    """[T] log-probabilities that the ratio divides by, `old` or `engine`, nats; cross-entropy reads none."""
    advantage_T: torch.Tensor
    """[T] advantage of each token, times its importance factor where there is one; cross-entropy reads none."""
    reference_T: torch.Tensor | None
    """[T] log-probabilities of the reference, nats; None without a KL term."""
    mask_T: torch.Tensor
    """[T] bool, True for rows whose token is in the loss."""
    sequence_mean: Callable[[torch.Tensor], torch.Tensor]
    """[T] -> [T]: gives each row the mean over the tokens of its sequence in the loss, over all context-parallel
    shards, without gradient."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossMetrics:
    """Facts of each row for accounting, without gradient; outside of the mask all are 0 or False."""

    ratio_T: torch.Tensor
    """[T] importance ratio before any clip: of the sequence for GSPO, of the token otherwise."""
    clipped_T: torch.Tensor
    """[T] bool: the clip stops the row's gradient; for CISPO: bounds its weight. False for a loss of a plugin."""
    clamped_T: torch.Tensor
    """[T] bool: a log-probability was below `FLOOR` or a log-ratio beyond `LIMIT`, so a value is not the formula's."""
    kl_T: torch.Tensor
    """[T] KL estimate of `kl_kind`, nats; 0 without a reference."""


def token_loss(name: str, inputs: LossInputs, options: LossOptions) -> torch.Tensor:
    """Compute the loss of each token: the named loss + kl_weight * KL - entropy_weight * entropy.

    A step's loss is the sum of weight times this over all rows of all ranks (`verifier.algorithms.aggregation`).

    Returns:
        [T] in the dtype of `current_T`. Rows outside of the mask are exactly 0, and so is their gradient. Finite for
        log-probabilities that are finite or -infinity.

    Raises:
        UsageError: see `check_loss`.
    """
    check_loss(name, options, has_reference=inputs.reference_T is not None)
    rows = _cleaned(inputs)
    total_T = find("loss", name)(rows, options)
    if options.kl_weight and rows.reference_T is not None:
        total_T = total_T + options.kl_weight * kl_estimate(rows.current_T, rows.reference_T, options.kl_kind)
    if options.entropy_weight:
        total_T = total_T - options.entropy_weight * rows.entropy_T
    return torch.where(rows.mask_T, total_T, 0)


@loss("clipped")
def clipped(inputs: LossInputs, options: LossOptions) -> torch.Tensor:
    """PPO's clipped loss: -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), with r = exp(current - divisor).

    With `dual_clip` = c, where A < 0 it is at most -c A: -max(min(...), c A).

    Source:
        PPO (arXiv 1707.06347), equation 7; clip-higher: DAPO (arXiv 2503.14476), equation 10; dual clip:
        arXiv 1912.09729, equation 5; verl, trainer/ppo/core_algos.py `compute_policy_loss_vanilla`.
    """
    result_T = _clipped(_exp(token_log_ratio(inputs)), inputs, options)
    if options.dual_clip is None:
        return result_T
    bounded_T = torch.minimum(result_T, -options.dual_clip * inputs.advantage_T)
    return torch.where(inputs.advantage_T < 0, bounded_T, result_T)


@loss("gspo")
def gspo(inputs: LossInputs, options: LossOptions) -> torch.Tensor:
    """GSPO: the clipped loss with the sequence's ratio s = exp(mean over its tokens of current - divisor).

    In the form by token, r = sg(s) * current probability / sg(current probability), where sg has no gradient. Summed
    with equal weights over a sequence, value and gradient are those of the loss by sequence.

    Source:
        GSPO (arXiv 2507.18071), equations 5, 7 and 14; verl, trainer/ppo/core_algos.py `compute_policy_loss_gspo`.
    """
    return _clipped(_exp(sequence_log_ratio(inputs)), inputs, options)


@loss("cispo")
def cispo(inputs: LossInputs, options: LossOptions) -> torch.Tensor:
    """CISPO: -sg(clip(r, 1 - clip_low, 1 + clip_high)) A current, where sg has no gradient.

    The clip bounds a token's weight, and no token loses its gradient.
    `clip_low` of 1 or more leaves the weight without a lower bound, as in the paper's runs.

    Source:
        MiniMax-M1 (arXiv 2506.13585), equations 4 and 5; verl, trainer/ppo/core_algos.py `compute_policy_loss_cispo`.
    """
    weight_T = _clip(_exp(token_log_ratio(inputs)).detach(), options)
    return -weight_T * inputs.advantage_T * inputs.current_T.clip(FLOOR)


@loss("importance")
def importance(inputs: LossInputs, options: LossOptions) -> torch.Tensor:
    """Plain importance sampling: -r A.

    Source:
        Sutton and Barto, Reinforcement Learning, second edition, section 13.3, with the ratio of section 5.5.
    """
    return -_exp(token_log_ratio(inputs)) * inputs.advantage_T


@loss("cross_entropy")
def cross_entropy(inputs: LossInputs, options: LossOptions) -> torch.Tensor:
    """Negative log-probability of the token: supervised fine-tuning. Reads neither advantage nor divisor."""
    return -inputs.current_T.clip(FLOOR)


def token_log_ratio(inputs: LossInputs) -> torch.Tensor:
    """Return [T] current - divisor, nats."""
    difference_T: torch.Tensor = log_ratio(inputs.current_T, inputs.divisor_T)
    return difference_T


def sequence_log_ratio(inputs: LossInputs) -> torch.Tensor:
    """Return [T] the mean of current - divisor over each row's sequence, with the gradient of the row's own."""
    mean_T = inputs.sequence_mean(token_log_ratio(inputs).detach()).to(inputs.current_T.dtype)
    current_T = inputs.current_T.clip(FLOOR)
    return torch.where(inputs.mask_T, mean_T, 0) + (current_T - current_T.detach())


def loss_metrics(name: str, inputs: LossInputs, options: LossOptions) -> LossMetrics:
    """Compute the facts of each row that a run reports: ratios, clips, clamps and KL, all over the same rows."""
    with torch.no_grad():
        rows = _cleaned(inputs)
        if name == "cross_entropy":
            rows = replace(rows, divisor_T=rows.current_T)
        log_T = sequence_log_ratio(rows) if name == "gspo" else token_log_ratio(rows)
        ratio_T = _exp(log_T)
        low_T, high_T = ratio_T < 1 - options.clip_low, ratio_T > 1 + options.clip_high
        clipped_T = torch.zeros_like(rows.mask_T)
        if name in ("clipped", "gspo"):
            clipped_T = (high_T & (rows.advantage_T > 0)) | (low_T & (rows.advantage_T < 0))
            if options.dual_clip is not None:
                clipped_T |= (ratio_T > options.dual_clip) & (rows.advantage_T < 0)
        elif name == "cispo":
            clipped_T = low_T | high_T
        clamped_T = (rows.current_T < FLOOR) | (rows.divisor_T < FLOOR) | (log_T.abs() > LIMIT)
        kl_T = torch.zeros_like(ratio_T)
        if rows.reference_T is not None:
            kl_T = kl_estimate(rows.current_T, rows.reference_T, options.kl_kind)
            clamped_T |= rows.reference_T < FLOOR
            if options.kl_kind == "k3":
                clamped_T |= log_ratio(rows.current_T, rows.reference_T).abs() > LIMIT
        return LossMetrics(
            ratio_T=torch.where(rows.mask_T, ratio_T, 0), clipped_T=clipped_T & rows.mask_T,
            clamped_T=clamped_T & rows.mask_T, kl_T=kl_T,
        )  # fmt: skip


def _cleaned(inputs: LossInputs) -> LossInputs:
    """Inputs in one dtype, and 0 outside of the mask, where no gradient passes either."""
    dtype = inputs.current_T.dtype

    def inside(value_T: torch.Tensor) -> torch.Tensor:
        return torch.where(inputs.mask_T, value_T.to(dtype), 0)

    return replace(
        inputs, current_T=inside(inputs.current_T), entropy_T=inside(inputs.entropy_T),
        divisor_T=inside(inputs.divisor_T.detach()), advantage_T=inside(inputs.advantage_T.detach()),
        reference_T=None if inputs.reference_T is None else inside(inputs.reference_T.detach()),
    )  # fmt: skip


def _exp(log_T: torch.Tensor) -> torch.Tensor:
    """Ratio; log-ratios beyond `LIMIT` are clamped, and have no gradient."""
    ratio_T: torch.Tensor = bounded(log_T).exp()
    return ratio_T


def _clip(ratio_T: torch.Tensor, options: LossOptions) -> torch.Tensor:
    return ratio_T.clip(max(0.0, 1 - options.clip_low), 1 + options.clip_high)


def _clipped(ratio_T: torch.Tensor, inputs: LossInputs, options: LossOptions) -> torch.Tensor:
    return -torch.minimum(ratio_T * inputs.advantage_T, _clip(ratio_T, options) * inputs.advantage_T)
