"""The kill matrix: which trials to run, a line for each as it ends, and a ledger of them to go on from.

The ledger has a line of JSON a trial, appended as it ends, so that a matrix can run in several goes.
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY
from verifier.core.finding import ExitCode, Verdict
from verifier.core.ledger import append_line, decode_line, read_lines
from verifier.core.stage import Stage
from verifier.errors import UsageError
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import Fault
from verifier.platform.provenance import Code, installed_versions, this_code

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
    ranks = fault.engine_tp, fault.engine_pp, fault.engine_ep
    return (fault.engine, fault.model, fault.dtype, *ranks, fault.lora_rank, fault.mesh.label())


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
    return run_trials(missing, write, record=lambda done: append_line(ledger, row_of(done, code)))


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
    """All rows of a ledger in the order in which their trials ended; none of a file that is not there."""
    lines = enumerate(read_lines(ledger), start=1)
    return [decode_line(ledger, number, line, TrialRow, "kill matrix") for number, line in lines]


def latest(rows: Iterable[TrialRow]) -> dict[str, TrialRow]:
    """The last row of each fault of the catalogue."""
    return {row.fault: row for row in rows if row.fault in CATALOG}


def lacking(rows: Iterable[TrialRow], faults: Iterable[Fault], code: Code) -> list[Fault]:
    """The faults that no trial passed with this code."""
    done = {row.fault for row in rows if row.tree == code.tree and not row.failures} if code.tree else set()
    return [fault for fault in faults if fault.id not in done]


ISSUE = re.compile(r"^([\w.-]+/[\w.-]+)#(\d+)")
HOW = """\
Which checks catch which faults. A fault is a bug that shipped, re-enacted in the real code path
([contributing.md](../contributing.md#a-fault)). Its trial runs the same session three times: the clean run must hold,
the faulted run must be violated, and the healed run must hold with the bits of the clean one. The fault is caught in
its own stage when the first bad stage that the report names is the one in which the bug sits.

These pages are drawn from a ledger with one row a trial, `golden/kill-matrix.jsonl`. Trials that it lacks for the
checked-out code run first:

```console
$ ci/with-env verifier faults matrix --ledger golden/kill-matrix.jsonl --output docs/kill-matrix
```
"""


def pages(rows: Iterable[TrialRow]) -> dict[str, str]:
    """File name to text of every page, from the latest row of each fault."""
    found = latest(rows)
    return {"README.md": _overview(found), **{f"{stage.label}.md": _stage_page(stage, found) for stage in Stage}}


def _passed(faults: Iterable[Fault], found: Mapping[str, TrialRow]) -> int:
    return sum(fault.id in found and not found[fault.id].failures for fault in faults)


def _table(*lines: Iterable[object]) -> list[str]:
    head, *body = [[str(cell) for cell in line] for line in lines]
    return [f"| {' | '.join(line)} |" for line in (head, ["---"] * len(head), *body)]


def _bullet(text: str) -> str:
    return textwrap.fill(f"- {text}", 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _page(*parts: str | Iterable[str]) -> str:
    lines = [line for part in parts for line in ([part] if isinstance(part, str) else part)]
    return "\n".join(lines) + "\n"


def _overview(found: Mapping[str, TrialRow]) -> str:
    faults = list(CATALOG.values())
    return _page(
        "# Kill matrix", "", HOW,
        f"{_passed(faults, found)} of {len(faults)} faults are caught in their own stage.", "",
        _table(("stage", "faults", "caught in it", "seconds"), *(_stage_line(stage, found) for stage in Stage)),
        "", "## When the trials ran", "",
        "Seconds include the clean run where a trial is the first to need it.",
        "",
        _table(("commit", "tier", "date", "trials"), *_commits(found.values())),
        "", "## What each check catches", "",
        _table(("check", "has to catch", "sees", "alone"), *(_check_line(code, found) for code in sorted(REGISTRY))),
        "", "## Faults that one check alone sees", "",
        "Without the check, such a fault would pass.", "",
        *(_bullet(f"{code}: {', '.join(names)}") for code in sorted(REGISTRY) if (names := _alone(code, found))),
    )  # fmt: skip


def _stage_line(stage: Stage, found: Mapping[str, TrialRow]) -> tuple[object, ...]:
    faults = of_stage(stage)
    seconds = [found[fault.id].duration_s for fault in faults if fault.id in found]
    known = [value for value in seconds if value is not None]
    return (
        f"[{stage.label}]({stage.label}.md)", len(faults), _passed(faults, found), f"{sum(known):.0f}" if known else ""
    )  # fmt: skip


def _commits(rows: Iterable[TrialRow]) -> Iterator[tuple[object, ...]]:
    counted = Counter(("GPU" if CATALOG[row.fault].gpus else "CPU", row.date, row.commit) for row in rows)
    for (tier, date, commit), trials in sorted(counted.items()):
        yield f"`{commit}`" if commit else "not known", tier, date or "not recorded", trials


def _check_line(code: str, found: Mapping[str, TrialRow]) -> tuple[object, ...]:
    return (
        f"{code} `{REGISTRY[code].name}`", sum(code in fault.caught_by for fault in CATALOG.values()),
        sum(code in row.caught for row in found.values()), len(_alone(code, found)),
    )  # fmt: skip


def _alone(code: str, found: Mapping[str, TrialRow]) -> list[str]:
    return sorted(f"`{row.fault}`" for row in found.values() if row.caught == (code,))


def _stage_page(stage: Stage, found: Mapping[str, TrialRow]) -> str:
    faults = of_stage(stage)
    return _page(
        f"# Kill matrix: {stage.label}", "",
        f"{_passed(faults, found)} of {len(faults)} faults of this stage are caught in it. "
        "Bold checks have to catch the fault.",
        "How these pages are made, and when the trials ran: [README.md](README.md).", "",
        _table(
            ("fault", "reproduces", "caught by", "also seen by", "first bad stage", "seconds"),
            *(_fault_line(fault, found.get(fault.id)) for fault in faults),
        ),
        "", "## What goes wrong", "",
        *(_bullet(f"`{fault.id}`: {fault.summary} ({_configuration(fault)})") for fault in faults),
    )  # fmt: skip


def _fault_line(fault: Fault, row: TrialRow | None) -> tuple[str, ...]:
    if row is None:
        return f"`{fault.id}`", _linked(fault.reproduces), "no trial", "", "", ""
    must = [f"**{code}**" if code in row.caught else f"{code} did not" for code in fault.caught_by]
    others = [code for code in row.caught if code not in fault.caught_by]
    seconds = "" if row.duration_s is None else f"{row.duration_s:.0f}"
    first = (row.first_bad or "none") + (f"; {'; '.join(row.failures)}" if row.failures else "")
    return f"`{fault.id}`", _linked(fault.reproduces), ", ".join(must), ", ".join(others), first, seconds


def _linked(source: str) -> str:
    return ISSUE.sub(r"[\1#\2](https://github.com/\1/issues/\2)", source)


def _configuration(fault: Fault) -> str:
    engine = "no engine" if fault.engine == "none" else fault.engine
    sizes = {"tp": fault.engine_tp, "pp": fault.engine_pp, "ep": fault.engine_ep}
    engine += "".join(f" {axis}{size}" for axis, size in sizes.items() if size > 1)
    adapter = [f"adapter of rank {fault.lora_rank}"] if fault.lora_rank else []
    gpu = [f"{fault.gpus} GPU"] if fault.gpus else []
    fixes = [f"with the fix {name}" for name in fault.fixes]
    return ", ".join([fault.model, fault.mesh.label(), fault.dtype, engine, *adapter, *gpu, *fixes])
