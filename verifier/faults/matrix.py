"""The kill matrix: which trials to run, a line for each as it ends, and a ledger of them to go on from.

The ledger has a line of JSON a trial, appended as it ends, so that a matrix can run in several goes.
"""

from __future__ import annotations

import json
import sys
import textwrap
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from verifier.core.finding import ExitCode, Verdict
from verifier.core.stage import Stage
from verifier.errors import UsageError
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import Fault
from verifier.platform.pins import installed_versions
from verifier.platform.provenance import Code, this_code

if TYPE_CHECKING:
    from verifier.faults.trial import TrialResult


def chosen(ids: Sequence[str]) -> list[Fault]:
    """Faults by id; for no ids, all that the CPU tier can show.

    Raises:
        UsageError: an unknown id, or a fault that needs a GPU.
    """
    for name in ids:
        if name not in CATALOG:
            raise UsageError(f"there is no fault `{name}`: `verifier faults list` prints all of them")
        if CATALOG[name].gpus:
            raise UsageError(f"fault `{name}` shows on a GPU only: `ci/gpu -k {name}` injects it there")
    return [CATALOG[name] for name in ids] or [fault for fault in CATALOG.values() if not fault.gpus]


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
    text = ""
    for stage in filter(of_stage, Stage):
        text += f"{stage.label}\n"
        for item in of_stage(stage):
            text += f"  {item.id}  [{', '.join(item.caught_by)}]  {item.reproduces}\n      {item.summary}\n"
        text += "\n"
    return f"{text}{len(CATALOG)} faults\n"


def of_stage(stage: Stage) -> list[Fault]:
    """All faults of one stage, by id."""
    return sorted((fault for fault in CATALOG.values() if fault.stage is stage), key=lambda fault: fault.id)


def run_trials(
    faults: Sequence[Fault],
    write: Callable[[str], None],
    *,
    keep: Path | None = None,
    record: Callable[[TrialResult], None] = lambda result: None,
) -> ExitCode:
    """Run trials, and write and record each as it ends: HOLDS if all of them are passed, else VIOLATED.

    The traces of faulted runs go to the folder `keep`, or are thrown away.
    """
    from verifier.faults.trial import Trials

    passed, began = 0, time.monotonic()
    with Trials(lambda text: print(text, file=sys.stderr, flush=True), keep) as trials:
        for fault in sorted(faults, key=_resources):
            result = trials.trial(fault)
            record(result)
            write(line_of(result) + (_where(result) if keep is not None else ""))
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
    checks = ", ".join(result.caught) or "no check"
    reasons = list(result.failures)
    if result.crashed:
        reasons.append("the faulted run ended early: " + result.crashed.splitlines()[0])
    line = f"{verdict:<10}  {result.fault.id}: {where}, by {checks} ({result.duration_s:.0f} s)\n"
    return line + textwrap.indent("".join(f"{reason}\n" for reason in reasons), " " * 12)


def _where(result: TrialResult) -> str:
    """Place of what a faulted run left, and the command that judges it; of a training run, its last step's trace."""
    traces = sorted(file.parent for file in result.trace.rglob("manifest.json"))
    replay = f"{'':12}next: `verifier replay {traces[-1]}`\n" if traces else ""
    size = sum(file.stat().st_size for file in result.trace.rglob("*") if file.is_file())
    return f"{'':12}trace: `{result.trace}` ({size / 1e6:.1f} MB)\n" + replay


def fill(ledger: Path, faults: Sequence[Fault], write: Callable[[str], None]) -> ExitCode:
    """Run the trials that a ledger lacks for the code that is checked out, and append a row as each ends.

    Returns HOLDS if the ledger then has a passed trial of every fault given, else VIOLATED.
    """
    code = this_code()
    missing = lacking(read(ledger), faults, code)
    write(f"{len(faults) - len(missing)} of {len(faults)} trials are in the ledger of {code.commit or 'this code'}\n")
    if not missing:
        return ExitCode.HOLDS
    return run_trials(missing, write, record=lambda done: append(ledger, [row_of(done, code)]))


class TrialRow(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Result of one trial."""

    fault: str
    """Id of the fault."""
    caught: tuple[str, ...]
    """Codes of the checks that the faulted run violates."""
    first_bad: str | None
    """Label of the first bad stage of the faulted run; None if nothing was bad."""
    fired: int | None
    """Number of times that the injected code ran; None where it is only known that it did."""
    healed: bool
    """True when the healed run holds, with the bits of the clean one."""
    failures: tuple[str, ...]
    """Reasons why the trial is not passed; empty if it is."""
    duration_s: float | None
    """Seconds that the trial took, a clean run included where it was the first of its kind; None if not recorded."""
    date: str
    """Day on which it ran (timezone.utc), as in ISO 8601."""
    commit: str
    tree: str
    model: str
    mesh: str
    engine: str
    versions: dict[str, str]
    """Upstream distributions and their versions."""


def _row(fault: Fault, **found: Any) -> TrialRow:
    return TrialRow(fault=fault.id, model=fault.model, mesh=fault.mesh.label(), engine=fault.engine, **found)


def row_of(result: TrialResult, code: Code) -> TrialRow:
    """The ledger's row of a trial that has just ended."""
    return _row(
        result.fault, caught=result.caught, first_bad=result.first_bad.stage.label if result.first_bad else None,
        fired=result.fired, healed=result.healed is Verdict.HOLDS and not result.healed_differs,
        failures=tuple(result.failures), duration_s=round(result.duration_s, 1),
        date=f"{datetime.now(timezone.utc):%Y-%m-%d}",
        **code._asdict(), versions=installed_versions(),
    )  # fmt: skip


def rows_of_gpu_run(results: Path) -> list[TrialRow]:
    """Rows of the faults that need a GPU, from a file of results of `ci/gpu`.

    Raises:
        UsageError: the file cannot be read, or has no such fault.
    """
    try:
        run = json.loads(results.read_text())
        faults = [fault for fault in CATALOG.values() if fault.gpus]
        rows = [next(row for row in run["rows"] if row.get("fault") == fault.id) for fault in faults]
        return [
            _row(
                fault, caught=tuple(row["caught"]), first_bad=row["first_bad_stage"], fired=row["fired"],
                healed=row["passed"], failures=() if row["passed"] else ("see its file",), duration_s=None,
                date=run.get("date", ""), commit=run["commit"], tree="", versions=run["versions"],
            )
            for fault, row in zip(faults, rows, strict=True)
        ]  # fmt: skip
    except (OSError, ValueError, KeyError, StopIteration) as problem:
        raise UsageError(f"`{results}` is no file of `ci/gpu` with the faults of a GPU: {problem!r}") from problem


def read(ledger: Path) -> list[TrialRow]:
    """All rows of a ledger in the order in which their trials ended; none of a file that is not there.

    Raises:
        UsageError: a line is no row.
    """
    rows = []
    for number, line in enumerate(ledger.read_text().splitlines() if ledger.exists() else (), start=1):
        try:
            rows.append(msgspec.json.decode(line, type=TrialRow))
        except msgspec.DecodeError as problem:
            raise UsageError(f"line {number} of the ledger `{ledger}` is no row: {problem}") from problem
    return rows


def append(ledger: Path, rows: Iterable[TrialRow]) -> None:
    """Add rows to a ledger."""
    with ledger.open("ab") as file:
        file.writelines(msgspec.json.encode(row) + b"\n" for row in rows)


def latest(rows: Iterable[TrialRow]) -> dict[str, TrialRow]:
    """The last row of each fault of the catalogue."""
    return {row.fault: row for row in rows if row.fault in CATALOG}


def lacking(rows: Iterable[TrialRow], faults: Iterable[Fault], code: Code) -> list[Fault]:
    """The faults that no trial passed with this code."""
    done = {row.fault for row in rows if row.tree == code.tree and not row.failures} if code.tree else set()
    return [fault for fault in faults if fault.id not in done]
