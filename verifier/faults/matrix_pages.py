"""The kill matrix as pages of Markdown, drawn from a ledger: an overview, and a page for each stage."""

from __future__ import annotations

import re
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY
from verifier.core.stage import Stage
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import Fault
from verifier.faults.matrix import TrialRow, latest, of_stage

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
    """Faults that this check sees and no other."""
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
    """A source with a link to the issue or pull request that it begins with, if it does."""
    return ISSUE.sub(r"[\1#\2](https://github.com/\1/issues/\2)", source)


def _configuration(fault: Fault) -> str:
    engine = "no engine" if fault.engine == "none" else fault.engine
    engine += f" tp{fault.engine_tp}" if fault.engine_tp > 1 else ""
    adapter = [f"adapter of rank {fault.lora_rank}"] if fault.lora_rank else []
    gpu = [f"{fault.gpus} GPU"] if fault.gpus else []
    fixes = [f"with the fix {name}" for name in fault.fixes]
    return ", ".join([fault.model, fault.mesh.label(), fault.dtype, engine, *adapter, *gpu, *fixes])
