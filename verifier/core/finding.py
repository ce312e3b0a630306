"""Finding, outcome, verdict and exit code: what a check's comparisons fold into, and whether that stops the line."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

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
            worst=max(bad, key=lambda item: item.badness),
            last=ordered[-1],
            first_bad_stage=ordered[0].stage,
            bad=tuple(ordered),
        )


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

    @property
    def verdict(self) -> Verdict:
        """VIOLATED on any mismatch; INCONCLUSIVE on nothing compared, nothing recorded, a crash or a moved contract.

        Else HOLDS.
        """
        if self.finding is not None:
            return Verdict.VIOLATED
        if self.error is not None or self.not_recorded or self.moved or not self.num_compared:
            return Verdict.INCONCLUSIVE
        return Verdict.HOLDS


def verdict_of(outcomes: Sequence[Outcome]) -> Verdict:
    """The dominant verdict; no outcome at all is inconclusive."""
    return max((item.verdict for item in outcomes), default=Verdict.INCONCLUSIVE)
