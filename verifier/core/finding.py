"""Finding, outcome, verdict and exit code: what a check's comparisons fold into, and whether that stops the line."""

from __future__ import annotations

import enum
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from verifier.core.comparison import Comparison
from verifier.core.stage import Stage


class ExitCode(enum.IntEnum):
    """Exit codes of every command."""

    HOLDS = 0
    """Everything compared, nothing differs."""
    VIOLATED = 1
    """At least one check found a mismatch."""
    INCONCLUSIVE = 2
    """Nothing differs, but something that had to be compared was not."""
    INTERNAL = 3
    """Verifier itself, or a process that it started, broke."""
    USAGE = 4
    """The command, the input or the machine cannot do what was asked."""


class Verdict(enum.IntEnum):
    """Ordered by dominance, so that composing verdicts is ``max``."""

    HOLDS = 0
    INCONCLUSIVE = 1
    VIOLATED = 2

    @property
    def exit_code(self) -> ExitCode:
        """Exit code of a command that comes to it: inconclusive stops the line as a violation does."""
        return ExitCode[self.name]


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The folded mismatches of one check."""

    count: int
    first: Comparison
    worst: Comparison
    last: Comparison
    first_bad_stage: Stage
    bad: tuple[Comparison, ...] = ()
    """Every mismatch, in order; the text renderer shows a few, JSON all."""

    @classmethod
    def fold(cls, bad: Sequence[Comparison]) -> Finding | None:
        """None when nothing mismatched. `first` is the earliest in the data flow."""
        if not bad:
            return None
        ordered = sorted(bad, key=lambda item: item.place)
        return cls(
            count=len(bad),
            first=ordered[0],
            worst=max(bad, key=lambda item: item.severity),
            last=ordered[-1],
            first_bad_stage=ordered[0].stage,
            bad=tuple(ordered),
        )


LEAST_BIN, GREATEST_BIN = -24, 24
"""Bins of shares that hold what is smaller, 0 too, and what is greater, infinity too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Distribution of the shares of its bound that a check's computed comparisons took; several add up."""

    count: int = 0
    greatest: float = 0.0
    bins: Mapping[int, int] = field(default_factory=dict)
    """Exponent k -> comparisons whose share is at most 2^k and above 2^(k-1)."""

    @classmethod
    def of(cls, shares: Iterable[float]) -> Shares:
        """Distribution of shares, each 0 or more; below 0 counts as 0."""
        found = [max(share, 0.0) for share in shares]
        bins = Counter(map(_bin, found))
        return cls(count=len(found), greatest=max(found, default=0.0), bins=dict(sorted(bins.items())))


def _bin(share: float) -> int:
    if not 0 < share < math.inf:
        return GREATEST_BIN if share else LEAST_BIN
    return min(max(math.ceil(math.log2(share)), LEAST_BIN), GREATEST_BIN)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one check. The verdict is derived; an author cannot write it."""

    code: str
    name: str
    num_compared: int
    finding: Finding | None = None
    not_recorded: tuple[str, ...] = ()
    """Needed evidence ("stage/kind") that the trace does not hold."""
    error: str | None = None
    moved: tuple[str, ...] = ()
    """Contracts with upstream that the check rests on, and that the installed versions do not keep."""
    left_out: tuple[str, ...] = ()
    """Names that the check had nothing to compare with."""
    widened: tuple[str, ...] = ()
    """Names of what had the same values in a wider dtype, "`name` (bfloat16 as float32)"."""
    shares: Shares = field(default_factory=Shares)
    """Distribution over the comparisons with a computed bound."""
    recurs: bool = True
    """False where the mismatch is of one version of a recorded loop alone, and a later one was compared and holds."""

    @property
    def suspected(self) -> bool:
        """Every mismatch is of a computed bound, by less than `SUSPECTED` times: fresh evidence decides."""
        return self.finding is not None and self.error is None and all(item.suspected for item in self.finding.bad)

    @property
    def verdict(self) -> Verdict:
        """VIOLATED on any mismatch, INCONCLUSIVE where it is suspected and does not recur.

        INCONCLUSIVE on nothing compared, nothing recorded, a crash or a moved contract too; else HOLDS.
        """
        if self.finding is not None:
            return Verdict.VIOLATED if self.recurs or not self.suspected else Verdict.INCONCLUSIVE
        if self.error is not None or self.not_recorded or self.moved or not self.num_compared:
            return Verdict.INCONCLUSIVE
        return Verdict.HOLDS


def verdict_of(outcomes: Sequence[Outcome]) -> Verdict:
    """The dominant verdict; no outcome at all is inconclusive."""
    return max((item.verdict for item in outcomes), default=Verdict.INCONCLUSIVE)
