"""Records of the stage `loss`: loss and gradients."""

from __future__ import annotations

import re
from typing import Literal

import msgspec

from verifier.core.owed import (
    Owed,
    anyone,
    every_rank,
    expert_rank,
    if_asked,
    last_stage,
    once,
    per_gradient,
    per_step,
    per_update,
)
from verifier.core.record import ArrayRecord, Count, Dtype, Lengths, Measurement, RankArrays, Real, Record
from verifier.stages.logprob.records import ActivationRecord

FORMULAS = ("cross_entropy", "clipped", "gspo", "sequence", "sapo", "cispo", "importance", "reinforce")
"""Losses of a token that a check and the oracle have a formula of."""
KL_KINDS = ("k1", "k2", "k3", "abs", "k1+", "k3+", "abs+")
"""Estimates of a KL divergence; one with a plus has its value and the gradient of k2."""


class ActivationGradient(ActivationRecord, frozen=True, kw_only=True, tag="loss/activation"):
    """Gradient of the sum of all tokens' losses with respect to the values at a point."""


class LogitSpreads(RankArrays, frozen=True, kw_only=True, tag="loss/spreads"):
    """Size and spread of the logits that the loss of one update read on one rank, by a second formula.

    Arrays [T], of rows as in `LossRows`: ``size`` float32, the greatest magnitude of the row's logits, divided by the
    temperature; records of older runs have none. And where the loss has an entropy ``spread`` float64, the variance of
    a row's log-probabilities under its own distribution, nats squared: what a scale of the row's logits changes its
    entropy by, with the other sign.
    """

    owed = (Owed(last_stage, per_update),)
    is_side = False


class UpdateRatios(Record, frozen=True, kw_only=True, tag="loss/ratios"):
    """Ratios and KL estimates of one optimizer step, over all tokens in the loss."""

    owed = (Owed(every_rank, per_update),)

    update: Count
    """Number of the optimizer step, from 1."""
    first: bool
    """The weights are those that made the `old` log-probabilities."""
    ratio_over: str
    at_reference: bool
    """The weights are the reference's."""
    ratio_gap: Real
    """Greatest distance of a ratio from 1."""
    kl_gap: Real
    """Greatest magnitude of a token's KL estimate, nats."""
    clipped: Count
    clamped: Count


class LossTerms(Record, frozen=True, kw_only=True, tag="loss/terms"):
    """Loss of a token that the config asks for."""

    owed = (Owed(anyone, per_step),)

    loss: str
    """Name of the loss; plugins add others."""
    clip_low: float
    clip_high: float
    dual_clip: float | None = None
    kl_weight: float = 0.0
    """Weight of the KL estimate in the loss; 0 where it is in the reward."""
    kl_kind: str = "k3"
    kl_limit: float | None = None
    """Greatest KL estimate, beyond which it has no gradient, nats."""
    kl_ratio: bool | Literal["own"] = False
    """The KL estimate is multiplied by the token's ratio; "own": by the ratio to itself, which is 1 with a gradient."""
    entropy_weight: float = 0.0
    shares: dict[str, tuple[float, ...]] = msgspec.field(default_factory=dict)
    """Factors of a term's weight, one of each rollout, by "kl" and "entropy", where its mean is not the loss's."""
    temperature: float = 1.0
    """Divisor of the logits."""
    divisor: float | None = None
    """Divisor of the sum over tokens, or of means of sequences or parts; None: the number of those in the loss."""
    parts: tuple[str, ...] = ()
    """Part of each rollout, whose mean stands in the place of its prompt's; empty: prompts."""
    steepness: tuple[float, float] = (1.0, 1.05)
    """Factor of the ratio in SAPO's sigmoid, of positive advantages and of others."""


class LossRows(RankArrays, frozen=True, kw_only=True, tag="loss/rows"):
    """Rows that the loss of one update read and made on one rank, over its micro-batches; every array is [T].

    ``sentinel`` int64 as in `TokenLedger`; ``mask`` bool, in the loss; ``current``, ``entropy`` float32, nats;
    ``loss`` float32, of the token before its weight; ``gradient``, ``entropy_gradient`` float32, of the rank's summed
    loss by the token's log-probability and entropy. And the columns that it read, float32: ``weight``, and for a policy
    loss ``divisor``, ``advantage`` and ``reference``.
    """

    owed = (Owed(last_stage, per_update),)


class RouterChoices(Record, frozen=True, kw_only=True, tag="loss/choices"):
    """Experts that one layer's routers chose by themselves in an update, measured by the oracle in the run's dtype."""

    owed = (Owed(anyone, once),)

    layer: Count
    """Global index."""
    num_tokens: Count
    shortfall: Real
    """Greatest distance by which a token's worst expert scores below the K-th best, as a share of the scores' range."""
    place: tuple[Count, Count]
    """Index of the sequence, and position, of the token that is farthest off."""
    noise: Real
    """Greatest change of a score by the run's dtype, as a share of that range."""
    closed: Count
    """Tokens with an expert of a group that is closed to them; 0 without groups."""
    closed_in_dtype: Count
    """The same of transformers' own choice in the run's dtype."""


class Objective(Record, frozen=True, kw_only=True, tag="loss/objective"):
    """The loss of a token that a step averages, nats.

    -reward * logprob - entropy_weight * entropy + drift_weight / 2 * (logprob - the engine's logprob)**2
    """

    owed = (Owed(anyone, if_asked),)
    is_side = False

    temperature: float
    """Divisor of the logits."""
    entropy_weight: float
    drift_weight: float
    every_second: float = 1.0
    """Factor of all this in every second step."""


def in_all_layers(name: str) -> str:
    """A tensor's name without its layer's index, which it shares with those of its kind."""
    return re.sub(r"\.layers\.\d+\.", ".layers.*.", name)


class GradientRecord(Record, frozen=True, kw_only=True, tag="loss/gradient"):
    """One checkpoint tensor's gradient in one step, and what Adam makes of it, measured by the oracle."""

    owed = (Owed(anyone, per_gradient),)

    gradient_scale: Real
    """Greatest element of transformers' gradient."""
    gradient: Measurement | None = None
    """Distance of the trainer's gradient from transformers'; None where the trainer has no gradient."""
    gradient_dtype: Dtype = "float32"
    """Dtype of the trainer's gradient."""
    gradient_doubt: Real = 0.0
    """Greatest change of transformers' gradient if log-probabilities move by what two right sides may differ by, and
    if each token's probability is rounded to float32."""
    gradient_rounding: Real = 0.0
    """Greatest distance of transformers' gradient in float32 from that in float64, over passes that round anew; 0 where
    the trainer's is so near that nobody looked (ADR 0103)."""
    gradient_noise: Real = 0.0
    """Greatest noise of any tensor's gradient in the run's dtype, in units of its greatest element."""
    gradient_norm: Real
    """L2 norm of all the trainer's gradients of that version."""
    group: str = ""
    """The tensor's name, or one for all experts' tensors of its kind in its layer; empty without a gradient."""
    group_length: Real = 1.0
    """Length of the trainer's gradients of the group along transformers', in units of theirs."""
    group_noise: Real = 0.0
    """Distance of transformers' own gradients of the group in the run's dtype, in units of their length."""
    noise_passes: Count = 1
    """Passes of transformers in the run's dtype, each rounded anew, that `gradient_noise` and `group_noise` are the
    greatest of."""
    loss: Real
    """Mean over the tokens in the loss by transformers, nats."""
    loss_scale: Real
    """Mean magnitude of a token's loss, nats."""
    loss_noise: Real = 0.0
    """Mean difference of a token's loss that the run's dtype makes, nats; of sampled steps of training the sum. With
    what rounding of log-probabilities to float32 changes it by."""
    loss_noise_error: Real = 0.0
    """Standard error of `loss_noise`, nats."""
    num_tokens: Count
    """Tokens in the loss."""
    further_loss: Real = 0.0
    """Mean cross-entropy of the tokens that a layer for a further token (MTP) is trained on, by transformers, nats."""
    further_noise: Real = 0.0
    """Change of it by rounding of log-probabilities to float32, nats."""
    num_further: Count = 0
    """Number of those tokens; 0 where the loss of such a layer is off."""
    acting: Count | None = None
    """Tokens in the loss with a gradient of their own; None where nobody counted."""
    step: Measurement | None = None
    """Distance of the live weight from Adam's; None where the trainer has no gradient."""
    update: Count = 0
    """Number of the optimizer step in a training run, from 1; 0 where each version has one."""
    rollouts: Count = 0
    """Rollouts whose gradient it is, in a further pass of the trainer before the step's; 0 where all of the step's."""
    of_rollouts: Count = 0
    """Rollouts that the step trains on, where it is the gradient of some."""


class RouterGradients(RankArrays, frozen=True, kw_only=True, tag="loss/routers"):
    """Gradients that the own losses of one rank's routers add to those of their logits in one optimizer step.

    Lists have an entry for each backward pass of a router. Arrays: ``counts`` [passes, experts] int64, rows that have
    the expert among those of their greatest scores; of some rows of each pass, one after another, [rows, experts]:
    ``logits``; ``found`` float64, the gradient by the logits less what comes through the experts' weights; ``size``
    [rows] float64, the greatest magnitude that was added up and taken off there.
    """

    owed = (Owed(expert_rank, per_update),)

    layers: tuple[Count, ...]
    """Global layer, from 0."""
    numbers: tuple[Count, ...]
    """Number of the pass among those of its layer, from 0: the micro-batch."""
    rows: tuple[Count, ...]
    """Rows of the pass, padding included."""
    kept: Lengths
    """Rows of it that are in the arrays."""
    experts_of_row: Count
    scores: Literal["softmax", "sigmoid", "sqrtsoftplus"]
    """Function that makes scores of logits."""
    dtype: Literal["float32", "float64", "bfloat16"]
    """Type of the logits."""


class KeptTensors(ArrayRecord, frozen=True, kw_only=True):
    """Copies of tensors for the oracle; arrays by checkpoint name, bfloat16 as float32."""

    dtypes: dict[str, Dtype]
    """Dtype that each tensor had."""


class KeptGradients(KeptTensors, frozen=True, kw_only=True, tag="loss/kept"):
    """Gradients of the step that leads to a version, summed over micro-batches and ranks, before any clip."""

    lacking: tuple[str, ...] | None = None
    """Tensors that are trained and have no gradient; None: all that are not here."""
