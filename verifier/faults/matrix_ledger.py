"""The ledger of fault trials: a line of JSON a trial, appended as it ends, so that a matrix can run in several goes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from verifier.core.finding import Verdict
from verifier.errors import UsageError
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import Fault
from verifier.platform.pins import PINS, installed

if TYPE_CHECKING:
    from verifier.faults.trial import TrialResult


class Code(NamedTuple):
    """Version of this package that ran."""

    commit: str
    """Short commit; ends in ``+`` where the package's files differ from it, and is empty outside of a checkout."""
    tree: str
    """Git tree of the package, which commits that leave the package as it is share; empty where it is not known."""


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
    """Day on which it ran (UTC), as in ISO 8601."""
    commit: str
    tree: str
    model: str
    mesh: str
    engine: str
    versions: dict[str, str]
    """Upstream distributions and their versions."""


def this_code() -> Code:
    """The commit and the tree of the package that is imported."""
    package = Path(__file__).parents[1]
    try:
        commit, tree = _git(package, "rev-parse", "--short=7", "HEAD"), _git(package, "rev-parse", "HEAD:./")
        changed = _git(package, "status", "--porcelain", "--", ".")
    except (OSError, subprocess.CalledProcessError):
        return Code("", "")
    return Code(f"{commit}+", "") if changed else Code(commit, tree)


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()  # noqa: S603


def row_of(result: TrialResult, code: Code) -> TrialRow:
    """The ledger's row of a trial that has just ended."""
    fault = result.fault
    return TrialRow(
        fault=fault.id, caught=result.caught, first_bad=result.first_bad.stage.label if result.first_bad else None,
        fired=result.fired, healed=result.healed is Verdict.HOLDS and not result.healed_differs,
        failures=tuple(result.failures), duration_s=round(result.duration_s, 1), date=f"{datetime.now(UTC):%Y-%m-%d}",
        commit=code.commit, tree=code.tree, model=fault.model, mesh=fault.mesh.label(), engine=fault.engine,
        versions={name: found for name in PINS if (found := installed(name)) is not None},
    )  # fmt: skip


def rows_of_gpu_run(results: Path) -> list[TrialRow]:
    """Rows of the faults that need a GPU, from a file of results of `ci/gpu`.

    Raises:
        UsageError: the file cannot be read, or has no such fault.
    """
    try:
        run = json.loads(results.read_text())
        return [
            TrialRow(
                fault=fault.id, caught=tuple(found["caught"]), first_bad=found["first_bad_stage"],
                fired=found["fired"], healed=found["passed"], failures=() if found["passed"] else ("see its file",),
                duration_s=None, date=run.get("date", ""), commit=run["commit"], tree="", model=fault.model,
                mesh=fault.mesh.label(), engine=fault.engine, versions=run["versions"],
            )
            for fault in CATALOG.values() if fault.gpus
            for found in [next(row for row in run["rows"] if row.get("fault") == fault.id)]
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
