"""Many trials in one go, and the matrix that they give."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from verifier.core.gate import ExitCode
from verifier.errors import UsageError
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import Fault
from verifier.faults.trial import Bench, TrialResult


def chosen(ids: Iterable[str]) -> list[Fault]:
    """Faults by id, all of them for no ids.

    Raises:
        UsageError: an unknown id.
    """
    wanted = list(ids)
    for name in wanted:
        if name not in CATALOG:
            raise UsageError(f"there is no fault `{name}`: `verifier faults list` prints all of them")
    return [CATALOG[name] for name in wanted] or list(CATALOG.values())


def listing() -> str:
    """One line a fault: id, stage, checks, source."""
    width = max(len(name) for name in CATALOG)
    lines = [
        f"{item.id:<{width}}  {item.stage.label:<9}  {', '.join(item.caught_by):<14}  {item.reproduces}"
        for item in sorted(CATALOG.values(), key=lambda item: (item.stage, item.id))
    ]
    return "\n".join([*lines, f"{len(lines)} faults"]) + "\n"


def run_trials(
    faults: Sequence[Fault],
    *,
    keep: Path | None,
    write: Callable[[str], None],
    markdown: Callable[[str], None] = lambda text: None,
) -> ExitCode:
    """Run trials, one line each as they end; subjects that share an engine follow each other.

    Returns:
        HOLDS if every trial is passed, else VIOLATED.
    """
    results: list[TrialResult] = []
    began = time.monotonic()
    with Bench(lambda text: print(text, file=sys.stderr, flush=True), keep) as bench:
        for fault in sorted(faults, key=lambda item: (item.engine, item.model, item.dtype, item.mesh.label())):
            results.append(bench.trial(fault))
            write(line_of(results[-1]))
    passed = sum(not item.failures for item in results)
    write(f"{passed} of {len(results)} faults caught in the right stage, {time.monotonic() - began:.0f} s\n")
    markdown(table_of(results))
    return ExitCode.HOLDS if passed == len(results) else ExitCode.VIOLATED


def line_of(result: TrialResult) -> str:
    """What one trial showed, and why it is not passed if so."""
    where = "nothing bad" if result.first_bad is None else f"{result.first_bad.stage.label}, `{result.first_bad.what}`"
    verdict = "caught" if not result.failures else "NOT PASSED"
    text = f"{verdict:<10}  {result.fault.id}: {where}, by {', '.join(result.caught) or 'no check'}"
    text += f" ({result.duration_s:.0f} s)\n"
    for reason in result.failures:
        text += f"            {reason}\n"
    if result.crashed:
        text += "            the faulted run ended early: " + result.crashed.splitlines()[0] + "\n"
    return text


def table_of(results: Sequence[TrialResult]) -> str:
    """The kill matrix as Markdown: a row a fault, a column a check that caught at least one."""
    codes = sorted({code for item in results for code in item.caught})
    lines = ["| fault | stage | first bad | " + " | ".join(codes) + " |", "| --- | --- | --- |" + " --- |" * len(codes)]
    for item in sorted(results, key=lambda item: (item.fault.stage, item.fault.id)):
        first = item.first_bad.stage.label if item.first_bad else "none"
        marks = ["x" if code in item.caught else "" for code in codes]
        lines.append(f"| `{item.fault.id}` | {item.fault.stage.label} | {first} | " + " | ".join(marks) + " |")
    return "\n".join(lines) + "\n"
