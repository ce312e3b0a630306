"""Value and gradient of the loss at each token, by a second formula."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from verifier.core.check import LOOP, At, Comparison, Given, Stage, Tolerance, Trace, check, compare_value
from verifier.core.condition import condition, knob, on, recorded
from verifier.stages.advantage.records import LossColumns
from verifier.stages.checks_conditions import UPDATED
from verifier.stages.loss.records import LossRows, LossTerms
from verifier.stages.pack.checks_loss_rows import UpdateRows, updates_of
from verifier.stages.train.records import TrainerStep

TERM = Tolerance(
    absolute=2e-5, unit="of the update's greatest",
    source="fp32: a ratio is the exponential of a difference of numbers of up to 20, each 1e-6 off",
)  # fmt: skip
LIMIT = 20.0
"""Log-ratios are clamped to it before they are exponentiated, and have no gradient beyond it, nats."""
NATS = 2e-6
"""Error of a difference of two log-probabilities in float32: numbers of up to 20, each 1e-6 off."""
KNOWN = ("cross_entropy", "clipped", "gspo", "cispo", "importance")


def kl_estimates(kind: str, distance: np.ndarray) -> np.ndarray:
    """Estimates of the KL divergence by current less reference log-probabilities, float64, nats.

    Source:
        http://joschu.net/blog/kl-approx.html
    """
    near = np.clip(distance, -LIMIT, LIMIT)
    kinds = {"k1": distance, "k2": distance**2 / 2, "k3": np.expm1(-near) + near}
    return np.asarray(kinds[kind])


FORMULA = condition(
    "the loss has no second formula", lambda run: knob(run, "algorithm") == "sft" or knob(run, "grpo.loss") in KNOWN
)  # fmt: skip


@check(
    "LSS004",
    needs=(LossRows, LossTerms, LossColumns),
    applies=on(step=UPDATED & FORMULA, loop=recorded(LossRows, LossTerms, LossColumns)),
)
def loss_differs_from_formula(trace: Trace) -> Iterator[Comparison]:
    """Every token's loss and its gradient are the textbook's, and the step reports their weighted sum.

    What it checks: per rollout of an update, the loss of each token and the derivatives of the summed loss by its
    log-probability and its entropy, against the formula in float64 of the log-probability that the ranks computed and
    of the weight, divisor, advantage and reference that the controller computed: cross-entropy, clipped with dual clip,
    GSPO over the whole sequence, CISPO, importance sampling, KL and entropy. And the loss that a rank reports.
    Why it matters: a clip that is read and not applied, a KL term of the wrong sign or without a gradient, a ratio that
    is always 1, a sequence's mean over one context-parallel shard: the curve looks plausible.
    Evidence: loss/rows, loss/terms, advantage/columns, advantage/policy, train/done.
    Tolerance and its source: 2e-5 of the greatest of the update; fp32, a greatest value up to 150 nats. A KL term may
    be off by what 2e-6 nats of its distance change it by. Rows within that of a clip's edge, or of the limit
    of log-ratios, have either gradient.
    Where to look: the terms of the loss, their signs and their divisors, and what is summed over which ranks.
    What it does not catch: what becomes of the gradient behind the log-probability (LSS001); losses of plugins.
    References: rllm#81, tianshou#433, verl#179, SkyRL#1353, AReaL#1273, SkyRL#1296.
    """
    for update in updates_of(trace):
        for terms in trace.of(LossTerms, version=update.columns.version):
            if terms.loss in KNOWN:
                yield from _formula(trace, update, terms)


def _formula(trace: Trace, update: UpdateRows, terms: LossTerms) -> Iterator[Comparison]:
    columns, weight = update.columns, update.given["weight"]
    value, slope, edge = _textbook(update, terms)
    of_value, of_slope = _roundings(update, terms)
    unclamped = edge & False
    if trace.manifest.command == LOOP:  # which need not clamp log-ratios
        unclamped |= np.abs(update.log_ratios(terms.loss)) > LIMIT - 1
    edge |= unclamped
    pairs = (
        ("loss", update.rows["loss"].astype(np.float64), value, unclamped, of_value),
        ("gradient", update.rows["gradient"].astype(np.float64), weight * slope, edge, np.abs(weight) * of_slope),
        (
            "gradient by the entropy", update.rows["entropy_gradient"].astype(np.float64),
            -terms.entropy_weight * weight, np.zeros(len(edge), bool), np.zeros(len(edge)),
        ),
    )  # fmt: skip
    for what, actual, expected, spared, rounding in pairs:
        allowed = TERM.absolute * max(float(np.abs(expected).max(initial=0.0)), 1e-12)
        allowed += float(rounding.max(initial=0.0))
        gaps = np.where(spared, 0.0, np.abs(actual - expected))
        gaps = np.where(np.isnan(gaps), np.inf, gaps)
        for at in worst_rows(update.rollout, gaps):
            name, place = columns.ids[update.rollout[at]], At(Stage.LOSS, columns.version)
            subject = f"the {what} of a token of `{name}` in {columns.name}"
            says = "the trainer's", f"{terms.loss}, float64"
            sides, gap, noun = (float(actual[at]), float(expected[at])), float(gaps[at]), f"{what} of {name}"
            texts: Given = {"subject": subject, "says": says}
            noun = f"{noun} in {columns.name}"
            yield compare_value(place, noun, *sides, allowed=TERM, bound=allowed, gap=gap, **texts)
    total = float((weight * value).sum()) / max(int(update.in_loss.sum()), 1)
    scale = float(np.abs(weight * value).sum()) / max(int(update.in_loss.sum()), 1)
    for report in trace.of(TrainerStep, version=columns.version, name=columns.name):
        bound = TERM.absolute * max(scale, 1e-12) + float(of_value.max(initial=0.0))
        what, says = f"reported loss of {columns.name} on rank {report.rank}", ("", "the weighted sum, float64")
        yield compare_value(
            report, what, float(report.loss), total, says=says, allowed=TERM, bound=bound, stage=Stage.LOSS
        )


def worst_rows(rollout: np.ndarray, gaps: np.ndarray) -> list[int]:
    """Row with the greatest gap of each rollout that has rows, the first of equal ones, by rollout."""
    order = np.lexsort((-np.arange(len(gaps)), gaps, rollout))
    return [int(at) for at in order[np.flatnonzero(np.diff(rollout[order], append=-1))]]


def _textbook(update: UpdateRows, terms: LossTerms) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss of each row, its derivative by the log-probability, and whether a clip's edge is too near to tell."""
    current = update.rows["current"].astype(np.float64)
    edge = np.zeros(len(current), bool)
    if terms.loss == "cross_entropy":
        value, slope = -current, np.full(len(current), -1.0)
    else:
        difference, advantage = update.log_ratios(terms.loss), update.given["advantage"]
        beyond = np.abs(difference) > LIMIT
        edge |= _at_limit(difference)
        ratio = np.exp(np.clip(difference, -LIMIT, LIMIT))
        low, high = max(0.0, 1 - terms.clip_low), 1 + terms.clip_high
        for bound in (low, high, terms.dual_clip or high):
            edge |= np.abs(ratio - bound) < TERM.absolute
        within = np.clip(ratio, low, high)
        if terms.loss == "importance":
            value = -ratio * advantage
            slope = np.where(beyond, 0.0, value)
        elif terms.loss == "cispo":
            value, slope = -within * advantage * current, -within * advantage
        else:
            stopped = beyond | np.where(advantage > 0, ratio > high, ratio < low)
            value = -np.minimum(ratio * advantage, within * advantage)
            if terms.dual_clip is not None:
                stopped |= (advantage < 0) & (ratio > terms.dual_clip)
                value = np.where(advantage < 0, np.minimum(value, -terms.dual_clip * advantage), value)
            slope = np.where(stopped, 0.0, -ratio * advantage)
    if terms.kl_weight:
        distance = current - update.given["reference"]
        near = np.clip(distance, -LIMIT, LIMIT)
        slopes = {
            "k1": np.ones_like(distance), "k2": distance, "k3": np.where(near == distance, -np.expm1(-near), 0.0),
        }  # fmt: skip
        if terms.kl_kind == "k3":
            edge |= _at_limit(distance)
        value = value + terms.kl_weight * kl_estimates(terms.kl_kind, distance)
        slope = slope + terms.kl_weight * slopes[terms.kl_kind]
    if terms.entropy_weight:  # a recorded loop without one may have no entropies
        value = value - terms.entropy_weight * update.rows["entropy"].astype(np.float64)
    return value, slope, edge


def _roundings(update: UpdateRows, terms: LossTerms) -> tuple[np.ndarray, np.ndarray]:
    """Changes of each row's loss, and of its derivative, by float32's rounding of a distance from the reference.

    Without an advantage a KL estimate of a reference that is hardly left is all that a loss is: a square of a distance
    that has few right digits.
    """
    if not terms.kl_weight:
        return np.zeros(len(update.place)), np.zeros(len(update.place))
    distance = np.abs(update.rows["current"] - update.given["reference"])
    lever = np.ones(len(distance)) if terms.kl_kind == "k1" else distance + NATS
    of_slope = np.full(len(distance), 0.0 if terms.kl_kind == "k1" else NATS)
    return terms.kl_weight * NATS * lever, terms.kl_weight * of_slope


def _at_limit(difference: np.ndarray) -> np.ndarray:
    """Log-ratios that are too near to the limit to tell on which side of it float32 is."""
    near: np.ndarray = np.abs(np.abs(difference) - LIMIT) < TERM.absolute
    return near
