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
from verifier.faults.trial import TrialResult, Trials


def chosen(ids: Iterable[str]) -> list[Fault]:
    """Faults by id, all that the CPU tier can show for no ids.

    Raises:
        UsageError: an unknown id, or a fault that needs a GPU.
    """
    wanted = list(ids)
    for name in wanted:
        if name not in CATALOG:
            raise UsageError(f"there is no fault `{name}`: `verifier faults list` prints all of them")
        if CATALOG[name].gpus:
            raise UsageError(f"fault `{name}` shows on a GPU only: `ci/gpu -k {name}` injects it there")
    return [CATALOG[name] for name in wanted] or [fault for fault in CATALOG.values() if not fault.gpus]


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
    with Trials(lambda text: print(text, file=sys.stderr, flush=True), keep) as trials:
        for fault in sorted(faults, key=_subject):
            results.append(trials.trial(fault))
            write(line_of(results[-1]))
    passed = sum(not item.failures for item in results)
    write(f"{passed} of {len(results)} faults caught in the right stage, {time.monotonic() - began:.0f} s\n")
    markdown(page_of(results))
    return ExitCode.HOLDS if passed == len(results) else ExitCode.VIOLATED


def _subject(fault: Fault) -> tuple[object, ...]:
    """What trials that can share an engine or a clean run have in common, the engine first."""
    return (fault.engine, fault.model, fault.dtype, fault.engine_tp, fault.lora_rank, fault.mesh.label())


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


def page_of(results: Sequence[TrialResult]) -> str:
    """The kill matrix as a page of Markdown: checks against faults, then what each fault re-enacts."""
    ordered = sorted(results, key=lambda item: (item.fault.stage, item.fault.id))
    passed = sum(not item.failures for item in ordered)
    return "\n".join(
        [
            "# Kill matrix",
            "",
            "Which checks catch which faults. Drawn by `verifier faults matrix --output docs/kill-matrix.md`, never by",
            "hand. In each trial the clean run holds, the first bad stage of the faulted run is where the fault sits,",
            "and the healed run holds the bits of the clean one. A capital X marks the checks that have to catch it.",
            "",
            f"{passed} of {len(ordered)} faults caught in their own stage.",
            "",
            *_matrix(ordered),
            "",
            "## What each fault re-enacts",
            "",
            "| fault | bug that shipped | what goes wrong | subject |",
            "| --- | --- | --- | --- |",
            *(_row(item.fault) for item in ordered),
            "",
        ]
    )


def _matrix(results: Sequence[TrialResult]) -> list[str]:
    """A row a fault, a column a check that caught at least one."""
    codes = sorted({code for item in results for code in item.caught})
    lines = ["| fault | stage | first bad | " + " | ".join(codes) + " |", "| --- | --- | --- |" + " --- |" * len(codes)]
    for item in results:
        first = item.first_bad.stage.label if item.first_bad else "none"
        marks = [("X" if code in item.fault.caught_by else "x") if code in item.caught else "" for code in codes]
        lines.append(f"| `{item.fault.id}` | {item.fault.stage.label} | {first} | " + " | ".join(marks) + " |")
    return lines


def _row(fault: Fault) -> str:
    subject = f"{fault.model}, {fault.mesh.label()}, {fault.dtype}, engine {fault.engine}"
    subject += f" tp{fault.engine_tp}" if fault.engine_tp > 1 else ""
    subject += f", adapter of rank {fault.lora_rank}" if fault.lora_rank else ""
    return f"| `{fault.id}` | {fault.reproduces} | {fault.summary} | {subject} |"
