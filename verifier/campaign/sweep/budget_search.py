"""Search for the largest budget that runs: fourfold steps, then bisection. A function of what was tried: it resumes."""

from __future__ import annotations

from collections.abc import Mapping

TOLERANCE = 0.1
"""Distance, as a share of the largest budget that ran, from which on the next larger one is not looked for."""
GROWTH = 4
"""Factor between budgets until one does not run. With 2, a search took two or three trials more on 80 or 141 GB."""


def next_budget(tried: Mapping[int, bool], *, least: int, most: int, multiple: int) -> int | None:
    """Return the budget to try next, or None where the largest is known.

    Args:
        tried: budget -> whether it ran.
        least: first budget, a multiple of `multiple`; if it does not run, nothing smaller is tried.
        most: greatest budget.
        multiple: divisor of all budgets.
    """
    runs = max((budget for budget, ran in tried.items() if ran), default=0)
    fails = min((budget for budget, ran in tried.items() if not ran), default=0)
    if not runs:
        return None if fails else least
    greatest = max(most // multiple * multiple, least)
    if not fails:
        return min(GROWTH * runs, greatest) if runs < greatest else None
    if fails - runs <= max(TOLERANCE * runs, multiple):
        return None
    return (runs + fails) // 2 // multiple * multiple
