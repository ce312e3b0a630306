"""Value and gradient of the loss at each token, by a second formula."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verifier.core import ragged
from verifier.core.check import LOOP, At, Comparison, Given, Stage, Tolerance, Trace, check, compare_value, owner_of
from verifier.core.condition import NEEDS, condition, knob, on
from verifier.stages.advantage.checks import LIMIT, kl_estimates
from verifier.stages.advantage.records import LossColumns, PolicyColumns
from verifier.stages.checks_conditions import GRPO, UPDATED
from verifier.stages.checks_parts import Part, parts_of
from verifier.stages.logprob.checks_logprobs import GREATEST_NOISES
from verifier.stages.logprob.records import SampledNoise
from verifier.stages.loss.records import FORMULAS, LossRows, LossTerms, UpdateRatios
from verifier.stages.pack.checks_packing import UpdateRows, updates_of
from verifier.stages.rollout.checks_engine_mismatch import MEASURED, bound_in_fp32, greatest_nats
from verifier.stages.train.records import TrainerStep

TERM = Tolerance(
    absolute=2e-5, unit="of the update's greatest",
    source="fp32: a ratio is the exponential of a difference of numbers of up to 20, each 1e-6 off",
)  # fmt: skip
NATS = 2e-6
"""Error of a difference of two log-probabilities in float32: numbers of up to 20, each 1e-6 off."""

FORMULA = condition(
    "the loss has no second formula", lambda run: knob(run, "algorithm") == "sft" or knob(run, "grpo.loss") in FORMULAS
)  # fmt: skip


@check("LSS004", needs=(LossRows, LossTerms, LossColumns), applies=on(step=UPDATED & FORMULA, loop=NEEDS))
def loss_differs_from_formula(trace: Trace) -> Iterator[Comparison]:
    """Every token's loss and its gradient are the textbook's, and the step reports their weighted sum.

    What it checks: per rollout of an update, the loss of each token and the derivatives of the summed loss by its
    log-probability and its entropy, against the formula in float64 of the log-probability that the ranks computed and
    of the weight, divisor, advantage and reference that the controller computed: cross-entropy, clipped with dual clip,
    GSPO over the whole sequence, CISPO, SAPO, importance sampling, REINFORCE, KL and entropy. And the loss that a rank
    reports: of a recorded loop that of its own tokens, or of all.
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
    sums: dict[tuple[int, str], list[_Sum]] = defaultdict(list)
    for update in updates_of(trace):
        for terms in trace.of(LossTerms, version=update.columns.version):
            if terms.loss in FORMULAS and (trace.manifest.command != LOOP or terms.rank == update.columns.rank):
                found = yield from _formula(trace, update, terms)
                sums[update.columns.version, update.columns.name].append(found)
    for (version, name), parts in sums.items():
        yield from _reported(trace, version, name, parts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sum:
    """Weighted sum of the losses of an update's tokens, of one rank where ranks have rollouts of their own."""

    columns: LossColumns
    total: float
    scale: float
    """Sum of the magnitudes."""
    rounding: float


def _reported(trace: Trace, version: int, name: str, sums: Sequence[_Sum]) -> Iterator[Comparison]:
    """Each rank's reported loss against the sum over its own tokens, or over those of all ranks."""
    by_rank = {each.columns.rank: each.total for each in sums}
    parts = parts_of(trace, version) or [Part(ranks=frozenset(by_rank), groups=(), masks=())]
    totals = [next((by_rank[rank] for rank in part.ranks if rank in by_rank), None) for part in parts]
    if any(total is None and part.num_tokens for total, part in zip(totals, parts, strict=True)):
        return  # some ranks do not record their losses
    known = [total or 0.0 for total in totals]
    whole = math.fsum(known) / (sums[0].columns.gradient_divisor or len(parts))
    own = {rank: total for total, part in zip(known, parts, strict=True) for rank in part.ranks}
    bound = TERM.absolute * max(1e-12, *(each.scale for each in sums)) + max(each.rounding for each in sums)
    for report in trace.of(TrainerStep, version=version, name=name):
        loss = float(report.loss)
        total = min((whole, own.get(report.rank, whole)), key=lambda right: abs(loss - right))
        what, says = f"reported loss of {name} on rank {report.rank}", ("", "the weighted sum, float64")
        yield compare_value(report, what, loss, total, says=says, allowed=TERM, bound=bound, stage=Stage.LOSS)


def _formula(trace: Trace, update: UpdateRows, terms: LossTerms) -> Generator[Comparison, None, _Sum]:
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
            -_weight_of(update, terms, "entropy") * weight, np.zeros(len(edge), bool), np.zeros(len(edge)),
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
    count, weighted = max(int(update.in_loss.sum()), 1), weight * value
    return _Sum(
        columns=columns, total=float(weighted.sum()) / count, scale=float(np.abs(weighted).sum()) / count,
        rounding=float(of_value.max(initial=0.0)),
    )  # fmt: skip


def worst_rows(rollout: np.ndarray, gaps: np.ndarray) -> list[int]:
    """Row with the greatest gap of each rollout that has rows, the first of equal ones, by rollout."""
    order = np.lexsort((-np.arange(len(gaps)), gaps, rollout))
    return [int(at) for at in order[np.flatnonzero(np.diff(rollout[order], append=-1))]]


def _textbook(update: UpdateRows, terms: LossTerms) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Loss of each row, its derivative by the log-probability, and whether a clip's edge is too near to tell."""
    current = update.rows["current"].astype(np.float64)
    edge = np.zeros(len(current), bool)
    if terms.loss in ("cross_entropy", "reinforce"):
        slope = np.full(len(current), -1.0) if terms.loss == "cross_entropy" else -update.given["advantage"]
        value = slope * current
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
        elif terms.loss == "sapo":
            steep = np.where(advantage > 0, *terms.steepness)
            soft = 1 / (1 + np.exp(-steep * (ratio - 1)))
            value = -4 / steep * soft * advantage
            slope = np.where(beyond, 0.0, -4 * soft * (1 - soft) * ratio * advantage)
        else:
            stopped = beyond | np.where(advantage > 0, ratio > high, ratio < low)
            value = -np.minimum(ratio * advantage, within * advantage)
            if terms.dual_clip is not None:
                stopped |= (advantage < 0) & (ratio > terms.dual_clip)
                value = np.where(advantage < 0, np.minimum(value, -terms.dual_clip * advantage), value)
            slope = np.where(stopped, 0.0, -ratio * advantage * update.sizes(terms.loss))
    if terms.kl_weight:
        distance = current - update.given["reference"]
        near = np.clip(distance, -LIMIT, LIMIT)
        slopes = {
            "k1": np.ones_like(distance), "k2": distance, "k3": np.where(near == distance, -np.expm1(-near), 0.0),
            "abs": np.sign(distance),
        }  # fmt: skip
        if terms.kl_kind == "k3":
            edge |= _at_limit(distance)
        if terms.kl_kind == "abs":
            edge |= np.abs(distance) < NATS
        divergence = kl_estimates(terms.kl_kind, distance, terms.kl_limit)
        rate = slopes["k2" if terms.kl_kind.endswith("+") else terms.kl_kind]
        rate = rate + kl_estimates(terms.kl_kind, distance) if terms.kl_ratio == "own" else rate
        if terms.kl_limit is not None and not terms.kl_kind.endswith("+"):
            edge |= np.abs(kl_estimates(terms.kl_kind, distance) / terms.kl_limit - 1) < TERM.absolute
            rate = np.where(divergence < terms.kl_limit, rate, 0.0)
        if terms.kl_ratio is True:
            times, own = np.exp(np.clip(difference, -LIMIT, LIMIT)), update.shared(divergence, terms.loss)
            divergence, rate = times * divergence, times * (update.sizes(terms.loss) * own + rate)
        weight = _weight_of(update, terms, "kl")
        value, slope = value + weight * divergence, slope + weight * rate
    if terms.entropy_weight:  # a recorded loop without one may have no entropies
        value = value - _weight_of(update, terms, "entropy") * update.rows["entropy"].astype(np.float64)
    return value, slope, edge


def _roundings(update: UpdateRows, terms: LossTerms) -> tuple[np.ndarray, np.ndarray]:
    """Changes of each row's loss, and of its derivative, by float32's rounding of a distance from the reference.

    Without an advantage a KL estimate of a reference that is hardly left is all that a loss is: a square of a distance
    that has few right digits.
    """
    if not terms.kl_weight:
        return np.zeros(len(update.place)), np.zeros(len(update.place))
    distance = np.abs(update.rows["current"] - update.given["reference"])
    lever = np.ones(len(distance)) if terms.kl_kind in ("k1", "abs", "k1+", "abs+") else distance + NATS
    of_slope = np.full(len(distance), 0.0 if terms.kl_kind in ("k1", "abs") else NATS)
    if terms.kl_ratio == "own":
        of_slope = of_slope + NATS * lever
    elif terms.kl_ratio:  # by the product rule
        times = np.exp(np.clip(update.log_ratios(terms.loss), -LIMIT, LIMIT)) * update.sizes(terms.loss)
        further = kl_estimates(terms.kl_kind, update.rows["current"] - update.given["reference"])
        lever, of_slope = times * (lever + further), times * (of_slope + NATS * (2 * lever + further))
    weight = _weight_of(update, terms, "kl")
    return weight * NATS * lever, weight * of_slope


def _weight_of(update: UpdateRows, terms: LossTerms, term: str) -> np.ndarray:
    """Weight of a further term at each row, beside the loss's own."""
    weight = terms.kl_weight if term == "kl" else terms.entropy_weight
    return weight * np.array(terms.shares.get(term) or np.ones(len(update.columns.ids)))[update.rollout]


def _at_limit(difference: np.ndarray) -> np.ndarray:
    """Log-ratios that are too near to the limit to tell on which side of it float32 is."""
    near: np.ndarray = np.abs(np.abs(difference) - LIMIT) < TERM.absolute
    return near


CLAMPED_RATIO = 0.999999
"""Least distance from 1 of a ratio that is clamped: exp(-20) is 2e-9."""
CLAMPED_KL = LIMIT - 1
"""Least KL estimate of a token whose distance from the reference is clamped, nats: exp(-d) - 1 + d at d = 20."""


def _loops_bound(trace: Trace, version: int) -> float:
    """Most nats that two passes of a recorded loop over the same weights may be apart; 0 of runs of this trainer."""
    if trace.manifest.command != LOOP:
        return 0.0
    if trace.manifest.dtype in ("", "float32"):
        temperature = next((terms.temperature for terms in trace.of(LossTerms, version=version)), 1.0)
        return bound_in_fp32(trace, version, temperature).absolute
    noise = next(trace.of(SampledNoise, version=version))
    return GREATEST_NOISES * float(greatest_nats(noise, np.array([-math.inf]))[0])


def _current_is_old(trace: Trace) -> Iterator[Comparison]:
    firsts = {(item.version, item.name) for item in trace.of(UpdateRatios) if item.first and item.ratio_over != "old"}
    for update in updates_of(trace) if firsts else ():
        columns = update.columns
        if (columns.version, columns.name) not in firsts:
            continue
        for policy in trace.of(PolicyColumns, version=columns.version):
            rows = dict(zip(policy.ids, ragged.split(trace.array(policy, "old"), policy.lengths), strict=True))
            old = np.concatenate([rows[name] for name in columns.ids])[update.place]
            gaps = np.abs(update.rows["current"].astype(np.float64) - old)
            gaps = np.where(gaps <= _loops_bound(trace, columns.version), 0.0, gaps)
            yield _scored_alike(gaps, f"log-probabilities of {columns.name}", columns.version, "the loss")


def _reference_is_old(trace: Trace) -> Iterator[Comparison]:
    for version in sorted({item.version for item in trace.of(UpdateRatios) if item.at_reference}):
        for policy in trace.of(PolicyColumns, version=version):
            arrays = trace.arrays(policy)
            own = arrays.get("own", arrays["mask"]).astype(bool)  # traces of older runs have the second alone
            for name, reader in (("penalty_reference", "the penalty"), ("reference", "the loss")):
                if name in arrays:
                    gaps = np.abs(arrays[name].astype(np.float64) - arrays["old"])[own]
                    yield _scored_alike(gaps, "log-probabilities of the reference", version, reader)


def _scored_alike(gaps: np.ndarray, what: str, version: int, read_by: str) -> Comparison:
    worst = float(np.max(gaps, initial=0.0))  # NaN stays
    subject = f"the {what} that {read_by} reads, in nats from `old` by the same weights,"
    at, what, part = At(Stage.LOGPROB, version), f"{what} that {read_by} reads", f"tokens: {np.count_nonzero(gaps):,}"
    badness = worst if math.isfinite(worst) else math.inf
    return compare_value(at, what, worst, 0.0, subject=subject, badness=badness, mismatched=part)


@check("LSS003", needs=(UpdateRatios,), applies=on(step=GRPO & UPDATED, loop=NEEDS & MEASURED))
def first_ratio_is_not_one(trace: Trace) -> Iterator[Comparison]:
    """Before the weights have moved the ratio to `old` is exactly 1, and at the reference the KL is exactly 0.

    What it checks: per rank, the first update of each batch whose ratio divides by `old`: the greatest distance of a
    ratio from 1; and the first update of the run: the greatest KL estimate. In every update: no token is clamped where
    all ratios and KL estimates are those of log-ratios within 20 nats. Of the first update of each batch whose ratio
    divides by `engine`: the log-probability of each token in the loss against `old`. And before the first update of the
    run: the reference's log-probability of each answer's token against `old`, in all mini-batches, wherever the KL is.
    Why it matters: log-probabilities of another temperature, of a dropout that is on, of other weights or of shifted
    tokens all show here, at no cost, in every step.
    Evidence: loss/ratios, and beside them loss/rows, advantage/columns and advantage/policy.
    Tolerance and its source: exact; the same weights score the same micro-batches by the same kernels. A recorded loop
    may score batches of other shapes: as LGP009, for one token.
    Where to look: temperature, dropout, weights and alignment of both passes.
    What it does not catch: later updates of a batch, whose ratio is not 1, and KL estimates of weights far from the
    reference: these may be clamped; a reference that is scored wrongly from a later step on (LGP001, LGP013); an `old`
    and a `current` that are wrong alike (LGP001).
    References: trl#4159, OpenRLHF#853, SkyRL#1353, prime-rl#2601, marin#1741.
    """
    yield from _current_is_old(trace)
    yield from _reference_is_old(trace)
    for item in trace.of(UpdateRatios):
        facts, nats = [], _loops_bound(trace, item.version)
        if item.first and item.ratio_over == "old":
            facts.append(("ratio", "greatest distance of a ratio from 1", float(item.ratio_gap)))
        if item.at_reference:
            facts.append(("KL", "greatest KL estimate", float(item.kl_gap)))
        far = float(item.ratio_gap) >= CLAMPED_RATIO or float(item.kl_gap) >= CLAMPED_KL
        facts.append(("clamps", "number of clamped tokens", 0.0 if far else float(item.clamped)))
        at = At(Stage.LOGPROB, item.version, owner_of(item))
        for what, words, actual in facts:
            badness, place = actual if math.isfinite(actual) else math.inf, f"of {item.name} on rank {item.rank}"
            why = f"no log-ratio is beyond {LIMIT:g} nats" if what == "clamps" else "the weights have not moved"
            subject, says = f"the {words} {place}", ("", why)
            texts = Given(subject=subject, says=says, badness=badness)
            same = actual <= (math.expm1(nats) if what == "ratio" else 0.0)
            yield compare_value(at, f"{what} {place}", actual, 0.0, same=same, **texts)
