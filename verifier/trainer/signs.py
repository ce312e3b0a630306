"""Signs of a run in its metrics: what to look at, never a violation; and the trend of the mismatch.

Bounds are rules of thumb: a sign says what was seen, with its numbers, and stops nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median, variance
from typing import Any

WINDOW = 20
"""Steps that a sign looks at, at most."""
FEW = 5
"""Steps of a floor, and of an average."""
_STANDARD_ERRORS = 2.0
"""Difference of two means, in its standard errors, from which on they differ."""
_LEAST_ENTROPY = 0.5
"""Share of the window's first entropy below which it fell."""
_LEAST_MIXED = 0.2
"""Share of groups with several rewards below which there are too few; docs/metrics.md."""
_GREATEST_TREND = 3.0
"""Multiple of its floor above which the mismatch grew."""

Row = Mapping[str, Any]
"""Metrics of a step."""


def mismatch_trend(before: Sequence[Row], row: Row) -> dict[str, float]:
    """Floor of a run's mismatch, and how many times that it is now.

    The floor is the median `mismatch_p99` of the first `FEW` steps that have one. Their weights differ little from
    those that both sides loaded.

    Args:
        before: metrics of the last steps, the newest last.
        row: metrics of this step.

    Returns:
        "mismatch_floor", nats, and "mismatch_trend", the median of the last `FEW` steps over the floor; empty where the
        step has no mismatch, without a trend where the floor is 0.
    """
    if "mismatch_p99" not in row:
        return {}
    own = [item for item in before if "mismatch_floor" in item]
    values = [*_column(own, "mismatch_p99"), float(row["mismatch_p99"])]
    floor = float(own[-1]["mismatch_floor"]) if len(own) >= FEW else median(values)
    found = {"mismatch_floor": floor}
    return found | {"mismatch_trend": median(values[-FEW:]) / floor} if floor else found


def signs_of(rows: Sequence[Row]) -> list[str]:
    """Signs in the metrics of the last steps.

    Args:
        rows: metrics of the last `WINDOW` steps at most, the newest last.

    Returns:
        One short text for each sign: flat reward, falling entropy, groups without variance, growing mismatch.
    """
    rows = rows[-WINDOW:]
    found = (_flat_reward(rows), _falling_entropy(rows), _equal_groups(rows), _growing_mismatch(rows))
    return [text for text in found if text is not None]


def _flat_reward(rows: Sequence[Row]) -> str | None:
    values = _column(rows, "reward")
    if len(values) < WINDOW:
        return None
    half = WINDOW // 2
    first, last = values[:half], values[half:]
    noise = math.sqrt((variance(first) + variance(last)) / half)
    if abs(fmean(last) - fmean(first)) > _STANDARD_ERRORS * noise:
        return None
    return f"reward is flat over {WINDOW} steps: {fmean(first):.3g}, then {fmean(last):.3g}"


def _falling_entropy(rows: Sequence[Row]) -> str | None:
    values = _column(rows, "entropy")
    if len(values) < WINDOW:
        return None
    first, last = fmean(values[:FEW]), fmean(values[-FEW:])
    if last >= _LEAST_ENTROPY * first:
        return None
    return f"entropy falls: {first:.3g} to {last:.3g} nats in {WINDOW} steps"


def _equal_groups(rows: Sequence[Row]) -> str | None:
    values = _column(rows, "mixed_groups")[-FEW:]
    if len(values) < FEW or fmean(values) >= _LEAST_MIXED:
        return None
    return f"{1 - fmean(values):.0%} of the groups of {FEW} steps are without variance"


def _growing_mismatch(rows: Sequence[Row]) -> str | None:
    trend = rows[-1].get("mismatch_trend", 0.0) if rows else 0.0
    return f"mismatch grows: {trend:.3g} times its floor" if trend > _GREATEST_TREND else None


def _column(rows: Sequence[Row], name: str) -> list[float]:
    """Finite values of a metric, of the steps that have one."""
    return [float(row[name]) for row in rows if name in row and math.isfinite(row[name])]
