"""Many trials in one go: which to run, a line for each as it ends, and what the ledger lacks."""

from __future__ import annotations

import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from verifier.core.finding import ExitCode
from verifier.core.stage import Stage
from verifier.errors import UsageError
from verifier.faults import matrix_ledger as ledgers
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import Fault

if TYPE_CHECKING:
    from verifier.faults.trial import TrialResult


def chosen(ids: Iterable[str]) -> list[Fault]:
    """Faults by id; for no ids, all that the CPU tier can show.

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


def of_stages(labels: Sequence[str]) -> list[Fault]:
    """Faults of some stages that the CPU tier can show; of all stages for no labels.

    Raises:
        UsageError: there is no such stage.
    """
    known = [stage.label for stage in Stage]
    for label in labels:
        if label not in known:
            raise UsageError(f"there is no stage `{label}`: choose --only from {', '.join(known)}")
    return [fault for fault in chosen(()) if not labels or fault.stage.label in labels]


def listing() -> str:
    """Every fault under its stage: id, checks, source, and what goes wrong."""
    parts = []
    for stage, faults in groupby(sorted(CATALOG.values(), key=lambda item: (item.stage, item.id)), lambda f: f.stage):
        parts.append(f"{stage.label}\n")
        for item in faults:
            parts.append(f"  {item.id}  [{', '.join(item.caught_by)}]  {item.reproduces}\n")
            parts.append(textwrap.indent(item.summary, "      ") + "\n")
        parts.append("\n")
    return "".join([*parts, f"{len(CATALOG)} faults\n"])


def run_trials(
    faults: Sequence[Fault],
    *,
    keep: Path | None,
    write: Callable[[str], None],
    record: Callable[[TrialResult], None] = lambda result: None,
) -> ExitCode:
    """Run trials, one line each as they end; those that share an engine follow each other.

    Args:
        faults: what to inject.
        keep: folder for the traces, or None.
        write: prints.
        record: gets each result as its trial ends.

    Returns:
        HOLDS if every trial is passed, else VIOLATED.
    """
    from verifier.faults.trial import Trials

    passed, began = 0, time.monotonic()
    with Trials(lambda text: print(text, file=sys.stderr, flush=True), keep) as trials:
        for fault in sorted(faults, key=_resources):
            result = trials.trial(fault)
            record(result)
            write(line_of(result))
            passed += not result.failures
    write(f"{passed} of {len(faults)} faults caught in the right stage, {time.monotonic() - began:.0f} s\n")
    return ExitCode.HOLDS if passed == len(faults) else ExitCode.VIOLATED


def _resources(fault: Fault) -> tuple[object, ...]:
    """Sort key: trials that can share an engine or a clean run follow each other, the engine first."""
    return (fault.engine, fault.model, fault.dtype, fault.engine_tp, fault.lora_rank, fault.mesh.label())


def line_of(result: TrialResult) -> str:
    """Line on one trial: what it showed, and why it is not passed if so."""
    where = "nothing bad" if result.first_bad is None else f"{result.first_bad.stage.label}, `{result.first_bad.what}`"
    verdict = "caught" if not result.failures else "NOT PASSED"
    text = f"{verdict:<10}  {result.fault.id}: {where}, by {', '.join(result.caught) or 'no check'}"
    text += f" ({result.duration_s:.0f} s)\n"
    for reason in result.failures:
        text += f"            {reason}\n"
    if result.crashed:
        text += "            the faulted run ended early: " + result.crashed.splitlines()[0] + "\n"
    return text


def fill(ledger: Path, faults: Sequence[Fault], write: Callable[[str], None]) -> ExitCode:
    """Run the trials that a ledger lacks for the code that is checked out, and append a row as each ends.

    Returns:
        HOLDS if the ledger then has a passed trial of every fault given, else VIOLATED.
    """
    code = ledgers.this_code()
    missing = ledgers.lacking(ledgers.read(ledger), faults, code)
    write(f"{len(faults) - len(missing)} of {len(faults)} trials are in the ledger of {code.commit or 'this code'}\n")
    if not missing:
        return ExitCode.HOLDS
    return run_trials(
        missing, keep=None, write=write, record=lambda done: ledgers.append(ledger, [ledgers.row_of(done, code)])
    )
