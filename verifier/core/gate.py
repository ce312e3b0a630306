"""The gate: which verdicts stop the line, and the exit code that says so."""

from __future__ import annotations

import enum
from collections.abc import Sequence

from verifier.core.finding import Outcome, Verdict


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


def verdict_of(outcomes: Sequence[Outcome]) -> Verdict:
    """The dominant verdict; no outcome at all is inconclusive."""
    return max((item.verdict for item in outcomes), default=Verdict.INCONCLUSIVE)


def exit_code(outcomes: Sequence[Outcome]) -> ExitCode:
    """Exit code for a set of outcomes: inconclusive stops the line as a violation does."""
    return {
        Verdict.HOLDS: ExitCode.HOLDS,
        Verdict.VIOLATED: ExitCode.VIOLATED,
        Verdict.INCONCLUSIVE: ExitCode.INCONCLUSIVE,
    }[verdict_of(outcomes)]
