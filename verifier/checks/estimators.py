"""Advantages of a policy-gradient batch by the textbook, within what their own dtype rounds."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from verifier.checks.conditions import GRPO
from verifier.core.check import Comparison, Given, Trace, check, compare_value, times
from verifier.core.condition import condition, on, recorded
from verifier.core.records_policy import Advantages, Drops, PolicyColumns

KNOWN = ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline")
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


ESTIMATOR = condition("the estimator has no second formula", lambda run: {*run.facts.estimators} & {*KNOWN})


@check(
    "ADV002", needs=(Advantages,),
    applies=on(step=GRPO & ESTIMATOR, loop=recorded(PolicyColumns, Advantages, Drops) & ESTIMATOR),
)  # fmt: skip
def advantage_differs_from_estimator(trace: Trace) -> Iterator[Comparison]:
    """Every advantage is what its estimator makes of the rewards of the whole batch, by trajectory and group.

    What it checks: per rollout with a token in the loss, the advantage against the textbook formula in float64: GRPO,
    Dr. GRPO, RLOO and both kinds of REINFORCE++. Dtype, epsilon and divisor of the deviation (n or n - 1) are those
    that the record names. Of an epsilon that it does not name the advantage may be that of any from 0 to 1e-4, and of a
    divisor that it does not name, that of one of the two for the whole batch.
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
    """Greatest distance beside its bound."""
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
    own: _Numbers, counts: Mapping[str, int], epsilons: tuple[float, float], ddof: int, u: float, least: float = 0.0
) -> dict[str, _Expected]:  # fmt: skip
    """Deviations by their root of mean squares and an epsilon; `least` is the least variance.

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
        rest = (own.error + most * off) / smallest if smallest else math.inf
        return _Expected(sides[0], sides[1], rest + _relative(4, u) * most + LEAST)

    return _each(own, expected)


def _scaled(own: _Numbers, factor: float, u: float) -> dict[str, _Expected]:
    """Deviations times a factor."""

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
