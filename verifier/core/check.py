"""The check registry, and the one place where comparisons become an outcome; all that a check is written with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from types import UnionType
from typing import get_args

from verifier.core.compare import At, Given, compare_array, compare_set, compare_text, compare_value, owner_of, times
from verifier.core.comparison import Comparison, Tolerance
from verifier.core.condition import ALWAYS, Applies, Condition, Parts
from verifier.core.finding import Finding, Outcome, Shares
from verifier.core.manifest import Manifest
from verifier.core.record import Record, kind_of
from verifier.core.stage import Stage
from verifier.core.trace import Trace

__all__ = [
    "At",
    "Comparison",
    "Given",
    "Stage",
    "Tolerance",
    "Trace",
    "check",
    "compare_array",
    "compare_set",
    "compare_text",
    "compare_value",
    "owner_of",
    "times",
]

CheckFn = Callable[[Trace], Iterator[Comparison]]
LOOP = "probe"
"""Command of the traces of other trainers' loops, each version of which is a step like the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """A pure generator of comparisons over a trace, with a code, a name and a page (its docstring)."""

    code: str
    name: str
    needs: tuple[type[Record] | UnionType, ...]
    """Classes of records without which the check is inconclusive; of a union one is enough."""
    fn: CheckFn
    applies: Applies = ALWAYS
    """Says of a manifest why the check does not judge that run; None where it does."""
    wholly: Applies = ALWAYS
    """Says why it judges only a part of what it is about."""
    page: str = ""
    """The docstring of the function, as `verifier explain` prints it."""

    def section(self, title: str) -> str:
        """One section of the page, in one line; empty where it has none."""
        _, _, rest = self.page.partition(f"    {title}: ")
        text = re.split(r"\n    (?=[A-Z][a-z ]+: )", rest, maxsplit=1)[0]
        return " ".join(text.split()).removesuffix(".")

    def completed(self, found: Comparison) -> Comparison:
        """A mismatch with what is allowed, and where to look, from the page where the comparison does not say it."""
        allowed = found.allowed or self.section("Tolerance and its source").partition(". ")[0]
        place = self.section("Where to look")
        return replace(found, allowed=allowed, hint=found.hint or (f"look at {place}" if place else ""))

    def gap(self, run: Manifest) -> str:
        """Clause on what the check has no means to judge in a run; empty for nothing."""
        refusal = self.applies(run) or self.wholly(run)
        return refusal.why if refusal is not None and refusal.gap else ""


REGISTRY: dict[str, Check] = {}


def check(
    code: str, *, needs: tuple[type[Record] | UnionType, ...], applies: Applies, wholly: Applies = ALWAYS
) -> Callable[[CheckFn], CheckFn]:
    """Register a function as a check; its name states what is wrong and its docstring is its page."""

    def register(fn: CheckFn) -> CheckFn:
        if code in REGISTRY:
            raise ValueError(f"check code {code} is taken by `{REGISTRY[code].name}`")
        if not fn.__doc__:
            raise ValueError(f"check {code} has no page: write the docstring first")
        own = applies.of(needs) if isinstance(applies, Parts | Condition) else applies
        REGISTRY[code] = Check(
            code=code, name=fn.__name__.replace("_", "-"), needs=needs, applies=own, wholly=wholly, fn=fn,
            page=fn.__doc__,
        )  # fmt: skip
        return fn

    return register


def needed(need: type[Record] | UnionType) -> str:
    """Name of what a check needs."""
    return " or ".join(map(kind_of, _kinds(need)))


def _kinds(need: type[Record] | UnionType) -> tuple[type[Record], ...]:
    return get_args(need) if isinstance(need, UnionType) else (need,)


def is_owed(need: type[Record] | UnionType, run: Manifest) -> bool:
    """Tell whether a run is to have records of what a check needs at all."""
    owes = any(owed.times(run) for kind in _kinds(need) for owed in kind.owed)
    if run.command == LOOP:  # what only bounds or places what is compared, where it was recorded
        sides = owes and any(kind.is_side for kind in _kinds(need))
        return sides or any(kind_of(kind) in run.facts.recorded for kind in _kinds(need))
    return owes


def _missing(need: type[Record] | UnionType, trace: Trace) -> tuple[str, ...]:
    """Sentences on records that a run owes and has not; of a union one kind is enough."""
    if not any(map(trace.has, _kinds(need))):
        return (needed(need),)
    return min((trace.missing(kind) for kind in _kinds(need) if trace.has(kind)), key=len)


def run_check(item: Check, trace: Trace) -> Outcome:
    """Fold a check's comparisons into an Outcome. Never raises.

    In a run that broke, what is absent of the last version may just not have been reached: it is neither a match nor a
    mismatch then.
    """
    moved = tuple(
        f"{broken.name} of {broken.package}" for broken in trace.manifest.moved_contracts if item.code in broken.checks
    )
    needs = [need for need in item.needs if is_owed(need, trace.manifest)]
    missing = tuple(text for need in needs for text in _missing(need, trace))
    if any(kinds[0].is_side and not any(map(trace.has, kinds)) for kinds in map(_kinds, needs)):
        return Outcome(code=item.code, name=item.name, num_compared=0, not_recorded=missing, moved=moved)
    seen, bad, error = 0, [], None
    shares: list[float] = []
    versions: set[int] = set()
    left_out: tuple[str, ...] = ()
    widened: dict[str, None] = {}
    try:
        for comparison in item.fn(trace):
            if comparison.absent and not comparison.same and not trace.came_past(comparison.version):
                continue
            seen += 1
            left_out = left_out or comparison.left_out
            if comparison.widened:
                widened[f"`{comparison.what}` ({comparison.widened})"] = None
            if comparison.share is not None:
                shares.append(comparison.share)
                versions.add(comparison.version)
            if not comparison.same:
                bad.append(item.completed(comparison))
    except Exception as problem:  # a broken check is never a pass, and never hides what it already found
        error = f"{type(problem).__name__}: {problem}"
    versions_bad = {found.version for found in bad}
    refuted = len(versions_bad) == 1 and max(versions, default=0) > max(versions_bad)
    return Outcome(
        code=item.code, name=item.name, num_compared=seen, finding=Finding.fold(bad), error=error, moved=moved,
        not_recorded=missing,
        left_out=left_out, widened=tuple(widened), shares=Shares.of(shares),
        recurs=trace.manifest.command != LOOP or not refuted,
    )  # fmt: skip
