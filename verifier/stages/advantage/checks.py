"""Advantages by a second formula of each estimator, inputs of a policy-gradient loss, and weights of tokens."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from verifier.core import ragged
from verifier.core.check import At, Comparison, Given, Stage, Tolerance, Trace, check, compare_value, times
from verifier.core.condition import NEEDS, condition, knob, on, recorded, told
from verifier.stages.advantage.records import ESTIMATORS, Advantages, LossColumns, PolicyColumns
from verifier.stages.checks_conditions import GRPO, REFERENCE, UPDATED
from verifier.stages.checks_parts import parts_of
from verifier.stages.data.records import Drops

ROUNDOFFS = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-24, "float64": 2.0**-53}
"""Unit roundoff of each dtype: greatest relative error of one rounding to nearest."""
EPSILON = 1e-6
"""Added to a group's standard deviation where the record names none."""
LEAST_VARIANCE = 1e-8
"""Least variance of REINFORCE++ where the record names no epsilon."""
LEAST = 1e-300
"""Least bound; it keeps equal numbers within it."""


@dataclass(frozen=True, slots=True)
class _Numbers:
    """One number a trajectory, as exact arithmetic gives it, and how far a right computation may be from any of it."""

    exact: Mapping[str, float]
    error: float


@dataclass(frozen=True, slots=True)
class _Expected:
    """Range of an advantage: from `low` to `high`, by the range of epsilon, and `allowed` beyond."""

    low: float
    high: float
    allowed: float

    def gap(self, actual: float) -> float:
        """Distance from the range; NaN of a NaN."""
        return max(self.low - actual, actual - self.high, 0.0) if math.isfinite(actual) else math.nan

    def holds(self, actual: float) -> bool:
        """False of a number that is not finite, whatever is allowed."""
        return self.gap(actual) <= self.allowed

    @property
    def text(self) -> str:
        """The range, or the one number, in nine digits."""
        return f"{self.low:.9g}" if self.low == self.high else f"{self.low:.9g} to {self.high:.9g}"


ESTIMATOR = condition("the estimator has no second formula", lambda run: {*run.facts.estimators} & {*ESTIMATORS})


@check(
    "ADV002", needs=(Advantages,),
    applies=on(step=GRPO & ESTIMATOR, loop=recorded(PolicyColumns, Advantages, Drops) & ESTIMATOR),
)  # fmt: skip
def advantage_differs_from_estimator(trace: Trace) -> Iterator[Comparison]:
    """Every advantage is what its estimator makes of the rewards of the whole batch, by trajectory and group.

    What it checks: per rollout with a token in the loss, the advantage against the textbook formula in float64: GRPO,
    also by the batch's deviation or by mean and deviation of the others of the group, Dr. GRPO, RLOO and both kinds of
    REINFORCE++. Dtype, epsilon and divisor of the deviation (n or n - 1) are those that the record names. Of an epsilon
    that it does not name the advantage may be that of any from 0 to 1e-4, and of a divisor that it does not name, that
    of one of the two for the whole batch.
    Why it matters: a group that is cut by a mini-batch, a standard deviation over the batch, a step's advantage given
    to the wrong trajectory: rewards look right and the direction is wrong.
    Evidence: advantage/advantages.
    Tolerance and its source: worst case of rounding in the record's dtype, u its unit roundoff, over n terms (Higham,
    Accuracy and Stability of Numerical Algorithms, 2002, (3.2) and (4.4)). No right computation is beyond it, in any
    order of its sums: the chance of a false alarm is 0.
    Where to look: which rollouts form a group or a trajectory; a recorded loop may name its denominator by
    `advantages(epsilon=..., ddof=...)`.
    What it does not catch: estimators of plugins, which have no second implementation; groups of one; between rewards
    that are equal but for rounding, any finite advantage where the epsilon may be 0.
    References: verl#6362, SkyRL#1335, AReaL#1730.
    """
    for item in trace.of(Advantages):
        choices = [found for ddof in item.ddofs or (None,) if (found := _expected(item, ddof)) is not None]
        if not choices:
            continue
        columns = zip(item.ids, item.trajectories, map(float, item.advantages), item.token_counts, strict=True)
        rows = [(name, trajectory, actual) for name, trajectory, actual, tokens in columns if tokens]
        expected = min(choices, key=lambda found: _worst(found, {trajectory: actual for _, trajectory, actual in rows}))
        for name, trajectory, actual in rows:
            if trajectory not in expected:
                continue
            right = expected[trajectory]
            gap, bound, says = right.gap(actual), right.allowed, ("", f"{item.estimator}, {_denominator(item)}")
            words = f"{bound:.3g} ({item.dtype}: worst case of its rounding through the formula)"
            same, sides = right.holds(actual), (f"{actual:.9g}", right.text)
            texts: Given = {"subject": f"the advantage of `{name}`", "says": says}
            yield compare_value(item, name, *sides, same=same, allowed=words, bound=bound, gap=gap, **texts)


def _worst(found: Mapping[str, _Expected], actual_of: Mapping[str, float]) -> float:
    rows = ((found[name], actual) for name, actual in actual_of.items() if name in found)
    return max((times(right.gap(actual), right.allowed) for right, actual in rows), default=0.0)


def _denominator(item: Advantages) -> str:
    """Clause on what a deviation is divided by."""
    if item.epsilons is None:
        return "epsilon as in docs/algorithms.md"
    low, high = item.epsilons
    return f"epsilon {low:g}" if low == high else f"epsilon not recorded, so {low:g} to {high:g}"


def _expected(item: Advantages, ddof: int | None) -> dict[str, _Expected] | None:
    """Advantage of each trajectory; without those in a group of one; None for an estimator of a plugin.

    `ddof` is subtracted from the number of terms that a variance is divided by; None: as the textbook of each.
    """
    u, estimator = ROUNDOFFS[item.dtype], item.estimator
    low, high = item.epsilons or (EPSILON, EPSILON)
    parts: dict[str, list[float]] = defaultdict(list)
    tokens: dict[str, int] = defaultdict(int)
    for place, name in enumerate(item.trajectories):
        parts[name] += (item.rewards[place], -item.penalties[place])
        tokens[name] += item.token_counts[place]
    rewards = {name: math.fsum(values) for name, values in parts.items()}
    errors = {name: _relative(len(values), u) * math.fsum(map(abs, values)) for name, values in parts.items()}
    if estimator == "reinforce++":
        return _whitened(_Numbers(rewards, max(errors.values(), default=0.0)), tokens, item.epsilons, ddof or 0, u)
    members: dict[str, list[str]] = defaultdict(list)
    for name, group in dict(zip(item.trajectories, item.groups, strict=True)).items():
        members[group].append(name)
    found: dict[str, _Expected] = {}
    centred: dict[str, float] = {}
    error = 0.0
    for names in members.values():
        size = len(names)
        if size == 1:
            if estimator == "reinforce++_baseline":  # then over the batch: what else it is made of is not known
                return {}
            continue
        each = dict.fromkeys(names, 1)
        own = _centred(_Numbers({name: rewards[name] for name in names}, max(errors[name] for name in names)), each, u)
        if estimator == "grpo":
            found |= _divided(own, each, (low, high), 1 if ddof is None else ddof, u)
        elif estimator == "grpo_batch":
            every = dict.fromkeys(rewards, 1)
            batch = _centred(_Numbers(rewards, max(errors.values())), every, u)
            found |= _divided(batch, every, (low, high), 1 if ddof is None else ddof, u, of=own)
        elif estimator == "grpo_others":
            for name in names if size > 2 else ():
                rest = _centred(_Numbers({it: rewards[it] for it in names if it != name}, own.error), each, u)
                left = _Numbers({name: own.exact[name] * size / (size - 1)}, 2 * own.error)
                equal = not any(rest.exact.values())  # then it is not divided
                terms = 1 if ddof is None else ddof
                found |= _scaled(left, 1.0, u) if equal else _divided(rest, each, (low, high), terms, u, of=left)
        elif estimator == "dr_grpo":
            found |= _scaled(own, 1.0, u)
        elif estimator == "rloo":
            found |= _scaled(own, size / (size - 1), u)
        elif estimator == "reinforce++_baseline":
            centred |= own.exact
            error = max(error, own.error)
        else:
            return None
    return _whitened(_Numbers(centred, error), tokens, item.epsilons, ddof or 0, u) if centred else found


def _relative(roundings: int, u: float) -> float:
    """Greatest relative error of so many roundings, one after another."""
    return roundings * u / (1 - roundings * u) if roundings * u < 1 else math.inf


def _centred(given: _Numbers, counts: Mapping[str, int], u: float) -> _Numbers:
    """Numbers less their mean, in which each stands so often; exactly 0 where all are equal.

    A number and the mean are both off by the error that they came with; product, sum and division round n + 1 times,
    relative to the greatest magnitude, and the difference once, of twice that.
    """
    terms, values = sum(counts[name] for name in given.exact), given.exact
    equal = len(set(values.values())) == 1
    mean = 0.0 if equal else math.fsum(values[name] * counts[name] for name in values) / max(terms, 1)
    most = max(map(abs, values.values()), default=0.0)
    error = 2 * given.error + _relative(terms + 3, u) * most
    return _Numbers({name: 0.0 if equal else value - mean for name, value in values.items()}, error)


def _divided(
    own: _Numbers, counts: Mapping[str, int], epsilons: tuple[float, float], ddof: int, u: float, least: float = 0.0,
    of: _Numbers | None = None,
) -> dict[str, _Expected]:  # fmt: skip
    """Deviations, or the numbers `of`, by the root of the deviations' mean square and an epsilon.

    `least` is the least variance.

    A root of a mean of squares is off by no more than the root of the mean square of what its terms are off by, and by
    n + 4 roundings of its own.
    """
    terms = sum(counts[name] for name in own.exact)
    divisor = terms - ddof
    if divisor <= 0:
        return {}
    squares = math.fsum(value**2 * counts[name] for name, value in own.exact.items())
    deviation = math.sqrt(max(squares / divisor, least))
    off = own.error * math.sqrt(terms / divisor) + _relative(terms + 4, u) * deviation
    smallest = max(deviation - off, math.sqrt(least) * (1 - 2 * u), 0.0) + epsilons[0] * (1 - u)

    def expected(value: float) -> _Expected:
        sides = sorted(value / (deviation + epsilon) if value else 0.0 for epsilon in epsilons)
        most = max(map(abs, sides))
        rest = (divided.error + most * off) / smallest if smallest else math.inf
        return _Expected(sides[0], sides[1], rest + _relative(4, u) * most + LEAST)

    divided = own if of is None else of
    return _each(divided, expected)


def _scaled(own: _Numbers, factor: float, u: float) -> dict[str, _Expected]:
    def expected(value: float) -> _Expected:
        right = value * factor
        return _Expected(right, right, own.error * factor + _relative(3, u) * abs(right) + LEAST)

    return _each(own, expected)


def _each(own: _Numbers, expected: Callable[[float], _Expected]) -> dict[str, _Expected]:
    return {name: expected(value) for name, value in own.exact.items()}


def _whitened(
    given: _Numbers, tokens: Mapping[str, int], epsilons: Sequence[float] | None, ddof: int, u: float
) -> dict[str, _Expected]:  # fmt: skip
    """Numbers less their mean over tokens, in standard deviations over tokens."""
    own = _centred(given, tokens, u)
    if epsilons is None:
        return _divided(own, tokens, (0.0, 0.0), ddof, u, LEAST_VARIANCE)
    return _divided(own, tokens, (epsilons[0], epsilons[1]), ddof, u)


FACTOR = Tolerance(
    absolute=1e-10, unit="of the greatest input", source="float64: exp of a sum of differences, in another order"
)
LIMIT = 20.0
"""Log-ratios are clamped to it before they are exponentiated, nats."""
FLOOR = -1e4
"""Least log-probability that counts, nats."""


@check(
    "ADV003", needs=(PolicyColumns, Advantages),
    applies=on(step=GRPO, loop=recorded(PolicyColumns, Advantages, Drops)),
)  # fmt: skip
def policy_input_differs(trace: Trace) -> Iterator[Comparison]:
    """Every token's inputs of the policy loss are those that the config names: divisor, advantage, importance factor.

    What it checks: per rollout, over its tokens in the loss: the log-probability that the ratio divides by is `old` or
    `engine`, as the config says; the advantage is the rollout's, times the truncated importance weight and the mask
    that the textbook makes of `old` and `engine`. Where masks take tokens out of the loss, it has those that all masks
    keep, and no other. And no token in the loss was sampled by weights older than the bound, or newer than those that
    are trained.
    Why it matters: a ratio against the wrong policy ignores staleness, or is always 1; a cap on the wrong level lets
    one sequence rule the step.
    Evidence: advantage/policy, advantage/advantages.
    Tolerance and its source: bitwise; log-probabilities and versions are copied. 1e-10 for factors, float64; of a
    recorded loop in less, as many roundings of its dtype as tokens, and 8, by 1 and the sum of its log-ratios. Of a
    token that is within this of a mask's bound either is right.
    What it does not catch: a log-probability that is wrong itself (LGP001, LGP003).
    References: SkyRL#1315, miles#1829, verl rollout_corr.
    """
    for item in trace.of(PolicyColumns):
        arrays = trace.arrays(item)
        advantage = {
            name: (float(value), ROUNDOFFS[found.dtype])
            for found in trace.of(Advantages, version=item.version)
            for name, value in zip(found.ids, found.advantages, strict=True)
        }
        found_drops = trace.of(Drops, version=item.version)
        reasons = dict(pair for drops in found_drops for pair in zip(drops.ids, drops.reasons, strict=True))
        parts = {name: ragged.split(array, item.lengths) for name, array in arrays.items()}
        for place, name in enumerate(item.ids):
            rows = {key: values[place] for key, values in parts.items()}
            is_dropped = bool(reasons.get(name))
            yield from _policy_inputs(item, name, rows, *advantage.get(name, (math.nan, 0.0)), is_dropped=is_dropped)


def _policy_inputs(
    item: PolicyColumns, name: str, rows: Mapping[str, np.ndarray], advantage: float, u: float, *, is_dropped: bool
) -> Iterator[Comparison]:
    mask, over = rows["mask"].astype(bool), item.ratio_over
    divisor, wanted = rows["divisor"][mask], rows[over][mask]
    same = bool((divisor == wanted).all())
    sentence = f"the ratio of `{name}` divides by other log-probabilities than `{over}`"
    found, hint = "" if same else _which(rows, mask, divisor), "look at which policy the ratio is taken against"
    yield compare_value(item, f"{name} (divisor)", found, f"`{over}`", same=same, sentence=sentence, hint=hint)
    own = rows["own"].astype(bool) if item.rejects else mask
    old, engine = (np.maximum(rows.get(side, rows["old"])[own].astype(np.float64), FLOOR) for side in ("old", "engine"))
    difference, stays = old - engine, mask[own]
    rounding = u * (len(difference) + TERMS) * (1.0 + float(np.abs(difference).sum()))
    kept, certain = _kept(item, difference, rounding)
    hint = "look at the level, the cap and the mask of importance weights"
    if item.rejects and item.masks and not is_dropped:
        wrong = np.flatnonzero(certain & (stays != kept))
        sentence = f"{wrong.size} of {len(stays)} sampled tokens of `{name}` are in the loss and rejected, or neither"
        found, right = f"{stays.sum()} tokens, sampled token {wrong[:1]} is wrong", f"{kept.sum()} tokens in the loss"
        yield compare_value(item, f"{name} (mask)", found, right, same=not wrong.size, sentence=sentence, hint=hint)
    weight = np.ones(len(kept))
    if item.weight_level:
        weight = _level(difference, item.weight_level).clip(float(item.weight_floor), float(item.weight_cap))
    whole, in_batch = advantage * weight[stays], kept[stays] | item.rejects
    expected, actual = np.where(in_batch, whole, 0.0), rows["advantage"][mask]
    other = np.where(certain[stays] | item.rejects, expected, np.where(in_batch, 0.0, whole))  # rounding decides
    gap = float(np.minimum(np.abs(actual - expected), np.abs(actual - other)).max(initial=0.0))
    relative = max(FACTOR.absolute, rounding) if item.weight_level else FACTOR.absolute
    bound = relative * max(1.0, float(np.abs(expected).max(initial=0.0)))
    what = f"{name} (advantage)"
    subject = f"the gap of a token's advantage in `{name}` to {advantage:.6g} times its factor"
    yield compare_value(item, what, gap, None, subject=subject, allowed=FACTOR, bound=bound, hint=hint)
    versions = rows["version"][mask]
    behind = item.trained_version - versions
    late = bool(((behind > item.max_staleness) | (behind < 0)).any())
    worst = int(versions[np.argmax(np.abs(behind))]) if late else 0
    sentence = f"a token of `{name}` was sampled by version {worst}, and trains version {item.trained_version}"
    found, right = f"version {worst}", f"{item.trained_version - item.max_staleness} to {item.trained_version}"
    hint, at = "look at when rollouts are dropped for their age, and at a token's version", At(Stage.DATA, item.version)
    yield compare_value(at, f"{name} (version)", found, right, same=not late, sentence=sentence, hint=hint)


def _which(rows: Mapping[str, np.ndarray], mask: np.ndarray, divisor: np.ndarray) -> str:
    equal = [name for name in ("old", "engine", "reference") if name in rows and (divisor == rows[name][mask]).all()]
    return f"equals `{equal[0]}`" if equal else "equals none of the log-probabilities"


def _kept(item: PolicyColumns, difference: np.ndarray, rounding: float) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that all masks keep, and those of which that is certain whatever a right computation rounds."""
    kept, certain = np.ones(len(difference), bool), np.ones(len(difference), bool)
    for level, *bounds in item.masks:
        value, (low, high) = _level(difference, level), map(float, bounds)
        kept &= (low <= value) & (value <= high)
        margin = rounding * np.maximum(1.0, np.abs(value))
        certain &= (np.abs(value - low) > margin) & (np.abs(value - high) > margin)
    return kept, certain


def _level(difference: np.ndarray, level: str) -> np.ndarray:
    """[N] ratios of tokens at a level, by old less engine; of "LEVEL_ESTIMATE" KL estimates of the engine from old."""
    level, _, kind = level.partition("_")
    value = kl_estimates(kind, -difference) if kind else difference
    if level != "token" and len(value):
        total = float(value.max()) if level == "greatest" else math.fsum(value)
        value = np.full(len(value), total / len(value) if level == "geometric" else total)
    return value if kind else np.exp(np.clip(value, -LIMIT, LIMIT))


PENALTY = Tolerance(
    absolute=1e-10, unit="of the weighted sum of magnitudes", source="float64: a sum over tokens, in another order"
)


TERMS = 8
"""Roundings of an estimate, and of the weight that its sum is multiplied by, in a recorded loop's own dtype."""
IN_REWARD = condition("no KL penalty in the reward", lambda run: knob(run, "grpo.kl_in") == "reward")


@check(
    "ADV004", needs=(Advantages, PolicyColumns),
    applies=on(step=GRPO & REFERENCE & IN_REWARD, loop=NEEDS & told("penalties", "no KL penalty in the reward")),
)  # fmt: skip
def penalty_differs_from_divergence(trace: Trace) -> Iterator[Comparison]:
    """Every reward is lowered by the weighted KL estimate, summed over the rollout's own tokens in the loss.

    What it checks: per rollout, dropped ones included, the penalty against weight times the sum of k1, k2 or k3 in
    float64, from the recorded log-probabilities `old` and of the reference, and the mask before any filter.
    Why it matters: a penalty of the wrong sign rewards distance from the reference; a mean over tokens, or a sum over
    the prompt too, weighs rollouts by their lengths. Advantages are right for these rewards all the same.
    Evidence: advantage/advantages, advantage/policy ("old", "penalty_reference", "own").
    Tolerance and its source: 1e-10 of the weighted sum of magnitudes; float64. Of a recorded loop in less, as many
    roundings of its dtype as tokens, and 8.
    Where to look: the sign, the weight, the estimate and the mask of the KL in the reward.
    What it does not catch: log-probabilities that are wrong themselves (LGP001); a reference that moved (LGP010).
    References: verl#179, trlx#441, slime#1247, slime#1372.
    """
    for policy in trace.of(PolicyColumns):
        arrays = trace.arrays(policy)
        if not {"old", "penalty_reference", "own"} <= arrays.keys():
            continue
        columns = [ragged.split(arrays[name], policy.lengths) for name in ("old", "penalty_reference", "own")]
        parts = zip(policy.ids, *columns, strict=True)
        rows = {name: (old[own.astype(bool)], reference[own.astype(bool)]) for name, old, reference, own in parts}
        for item in trace.of(Advantages, version=policy.version):
            for name, actual in zip(item.ids, item.penalties, strict=True):
                if name not in rows:  # a recorded loop's, of another mini-batch or rank
                    continue
                old, reference = (np.maximum(side.astype(np.float64), FLOOR) for side in rows[name])
                estimates = kl_estimates(item.kl_kind, old - reference)
                size = float(np.abs(old - reference).sum() + np.abs(estimates).sum())
                right = item.kl_weight * math.fsum(estimates)
                rounding = 0.0 if item.dtype == "float64" else (len(old) + TERMS) * ROUNDOFFS[item.dtype]
                most = max(PENALTY.absolute, rounding) * item.kl_weight * size + 1e-300
                says = "", f"{item.kl_weight:g} times the sum of {item.kl_kind} over {len(old)} tokens"
                subject = f"the KL penalty in the reward of `{name}`"
                yield compare_value(item, name, actual, right, subject=subject, says=says, allowed=PENALTY, bound=most)


def kl_estimates(kind: str, distance: np.ndarray, limit: float | None = None) -> np.ndarray:
    """Estimates of the KL divergence by current less reference log-probabilities, up to a limit, float64, nats.

    Source:
        http://joschu.net/blog/kl-approx.html
    """
    near = np.clip(distance, -LIMIT, LIMIT)
    kinds = {"k1": distance, "abs": np.abs(distance), "k2": distance**2 / 2, "k3": np.expm1(-near) + near}
    return np.asarray(np.minimum(kinds[kind.removesuffix("+")], math.inf if limit is None else limit))


WEIGHT = Tolerance(
    absolute=1e-12, unit="of the weight", source="float64: a weight is two divisions of whole numbers, 2 ulp apart"
)
WEIGHT_ROUNDINGS = 16
"""Roundings of a weight in the dtype of a loss whose backward pass says it: mask, means, sums, and a scale."""


@check("ADV001", needs=(LossColumns,), applies=on(step=UPDATED, loop=NEEDS))
def weight_differs_from_aggregation(trace: Trace) -> Iterator[Comparison]:
    """The weight of every token is what the aggregation makes of the masks of the whole batch.

    What it checks: per rollout, the weights of its tokens against the textbook mean in float64, from masks and groups
    alone: over all tokens, over sequences, or over prompts.
    Why it matters: a mean of the means of micro-batches, or a denominator taken after the split, changes the step with
    every change of mesh or micro-batch. It is the commonest silent bug of RL trainers.
    Evidence: advantage/columns ("weight", "mask").
    Tolerance and its source: 1e-12 of the weight; float64, two divisions. Of a recorded loop, whose weights are the
    derivatives of its loss by each token's, 16 roundings in the loss's dtype.
    Where to look: the denominators, and whether they are those of the whole batch.
    What it does not catch: a mask that is wrong itself (PCK001), tokens that came to no loss of a recorded loop
    (PCK004), and what ranks make of the weights (LSS001).
    References: AReaL#1730, verl#3741, verl#7200, trl#3231.
    """
    for item in trace.of(LossColumns):
        masks = ragged.split(trace.array(item, "mask").astype(bool), item.lengths)
        weights = ragged.split(trace.array(item, "weight").astype(np.float64), item.lengths)
        for name, weight, mask, right in zip(item.ids, weights, masks, _on_rank(trace, item, masks), strict=True):
            wanted = np.where(mask & ~np.isnan(weight), right, 0.0)
            weight = np.nan_to_num(weight)
            at = int(np.abs(weight - wanted).argmax()) if len(weight) else 0
            actual, asked = (float(side[at]) if len(side) else 0.0 for side in (weight, wanted))
            subject = f"the weight of token {at} of `{name}`"
            says = ("", f"{item.aggregation} of the whole batch, float64")
            bound = max(WEIGHT.absolute, WEIGHT_ROUNDINGS * ROUNDOFFS[item.dtype]) * right
            yield compare_value(item, name, actual, asked, subject=subject, says=says, allowed=WEIGHT, bound=bound)


def _on_rank(trace: Trace, item: LossColumns, masks: list[np.ndarray]) -> list[float]:
    """Weight of each rollout's tokens on a rank: that in the mean, times what ranks' gradients are divided by."""
    parts, groups, begin = parts_of(trace, item.version), list(item.groups), 0
    place = next((number for number, part in enumerate(parts) if item.rank in part.ranks), None)
    if place is not None:
        own = {other.rank: other.groups for other in trace.of(LossColumns, version=item.version, name=item.name)}
        told = [next((own[rank] for rank in part.ranks if rank in own), part.groups) for part in parts]
        groups = [f"{number}/{group}" for number, each in enumerate(told) for group in each]
        begin = sum(len(part.masks) for part in parts[:place])
        masks = [mask for part in parts for mask in part.masks]
    factor = item.gradient_divisor or max(len(parts), 1)
    return [factor * weight for weight in _weights(item, masks, groups)[begin : begin + len(item.ids)]]


def _weights(item: LossColumns, masks: list[np.ndarray], groups: Sequence[str]) -> list[float]:
    counts = [int(mask.sum()) for mask in masks]
    total, trained = sum(counts), [count for count in counts if count]
    by_prompt: dict[str, int] = defaultdict(int)
    for group, count in zip(groups, counts, strict=True):
        by_prompt[group] += count
    prompts = sum(1 for count in by_prompt.values() if count)
    return [
        0.0 if not count
        else 1 / (item.divisor or total) if item.aggregation == "token_mean"
        else 1 / ((item.divisor or len(trained)) * count) if item.aggregation == "sequence_mean"
        else 1 / ((item.divisor or prompts) * by_prompt[group]) if item.aggregation == "prompt_mean"
        else 1 / (len(counts) * item.constant)
        for count, group in zip(counts, groups, strict=True)
    ]  # fmt: skip
