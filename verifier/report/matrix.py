"""The kill matrix: which check saw which re-enacted bug, which bug nobody saw, which check nothing broke."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TrialRow:
    """What one fault's trial (clean, faulted, healed) came to."""

    fault: str
    stage: str
    """Where the bug was put."""
    reproduces: str
    expected: tuple[str, ...]
    """Codes that must be violated."""
    violated: tuple[str, ...]
    """Codes that were, in the faulted run."""
    problems: tuple[str, ...] = ()
    """Why the trial failed, one sentence each; empty when it passed."""
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Clean held, the fault fired, every expected check saw it in its stage, healed equals clean."""
        return not self.problems


def uncaught(rows: Sequence[TrialRow]) -> list[str]:
    """Faults that no check saw."""
    return [row.fault for row in rows if not row.violated]


def unbroken(rows: Sequence[TrialRow], codes: Sequence[str]) -> list[str]:
    """Checks that no fault broke."""
    return sorted(set(codes) - {code for row in rows for code in row.violated})


def render_trials(rows: Sequence[TrialRow]) -> str:
    """One line per trial, then each problem, then the count."""
    wide = max((len(row.fault) for row in rows), default=0)
    stage = max((len(row.stage) for row in rows), default=0)
    lines = [
        f"  {'caught' if row.passed else 'FAILED':<6}  {row.fault:<{wide}}  {row.stage:<{stage}}  "
        f"{row.seconds:>6.1f} s  {' '.join(row.violated) or '-'}"
        for row in rows
    ]
    lines += [f"\n{row.fault}: {problem}" for row in rows for problem in row.problems]
    passed = sum(row.passed for row in rows)
    return "\n".join([*lines, f"\n{passed} of {len(rows)} faults are caught in the right stage"]) + "\n"


def render_matrix(rows: Sequence[TrialRow], codes: Sequence[str]) -> str:
    """The matrix in Markdown, faults by checks: `X` where the catalogue demands it, `x` where it was seen as well."""
    used = sorted(set(codes))
    lines = [
        f"| fault | stage | re-enacts | {' | '.join(used)} |",
        f"| --- | --- | --- |{' --- |' * len(used)}",
    ]
    for row in rows:
        cells = ["" if code not in row.violated else "X" if code in row.expected else "x" for code in used]
        lines.append(f"| `{row.fault}` | {row.stage} | {row.reproduces} | {' | '.join(cells)} |")
    for title, names in (("Caught by nobody", uncaught(rows)), ("Broken by no fault", unbroken(rows, used))):
        lines.append(f"\n{title}: {', '.join(f'`{name}`' for name in names) or 'none'}.")
    return "\n".join(lines) + "\n"


def render_trials_json(rows: Sequence[TrialRow]) -> str:
    """Every trial, whole."""
    return json.dumps([{**asdict(row), "passed": row.passed} for row in rows], indent=1) + "\n"
