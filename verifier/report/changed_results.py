"""Two results beside each other, two gates or two traces: verdicts, sentences and numbers that are not the same."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from verifier.core import store
from verifier.core.outputs import printable
from verifier.errors import UsageError
from verifier.report import report_of
from verifier.report.charts import measures_of
from verifier.report.gate_result import BADNESS, CellResult
from verifier.report.pages import gate_at
from verifier.report.render_text import first_line

MOVED = 0.05
"""Share by which a measured number differs before it is told; repeated runs differ in the last bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CellStanding:
    """One cell of a gate, or one trace, as it stood."""

    verdict: str
    reason: str = ""
    checks: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Check -> its verdict, and things compared."""
    sentences: Mapping[str, str] = field(default_factory=dict)
    """Check -> first line on what it found."""
    measures: Mapping[str, float] = field(default_factory=dict)
    """Numbers by name, with units."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultStanding:
    """A whole result as it stood."""

    path: str
    kind: str
    """"gate" or "trace"."""
    verdict: str
    made_by: Mapping[str, str]
    """Versions, code, host and fixes, by name."""
    cells: Mapping[str, CellStanding]


@dataclass(frozen=True, slots=True, kw_only=True)
class VerdictChange:
    """A verdict that is another one in the new result."""

    cell: str
    check: str
    """Code; empty where it is the cell's own verdict."""
    before: str
    after: str
    sentence: str = ""

    @property
    def worse(self) -> bool:
        """Test for a verdict that is worse than before."""
        return BADNESS[self.after] > BADNESS[self.before]


@dataclass(frozen=True, slots=True, kw_only=True)
class NumberChange:
    """A number, or a sentence with numbers, that is another one while the verdict stayed."""

    cell: str
    what: str
    before: str
    after: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultChange:
    """All that differs between two results."""

    old: str
    new: str
    decision: tuple[str, str]
    made_by: dict[str, tuple[str, str]]
    verdicts: list[VerdictChange]
    numbers: list[NumberChange]
    num_checks: tuple[int, int]

    @property
    def worse(self) -> bool:
        """Test for a change for the worse: a verdict, or something that held and is judged no more."""
        return BADNESS[self.decision[1]] > BADNESS[self.decision[0]] or any(item.worse for item in self.verdicts)


def result_of(path: Path) -> ResultStanding:
    """Read a gate's result or a trace, whose checks are run.

    Raises:
        UsageError: neither lies there.
    """
    if (gate := gate_at(path)) is not None:
        made = _made_by(gate.verifier, gate.commit, ", ".join([gate.host, *gate.gpus]), gate.versions, gate.fixes)
        cells = {item.cell.id: _of_cell(item) for item in gate.cells}
        return ResultStanding(path=str(path), kind="gate", verdict=gate.decision, made_by=made, cells=cells)
    trace = store.read(path)
    report, manifest = report_of(trace, str(path)), trace.manifest
    cell = CellStanding(
        verdict=report.verdict.name.lower(),
        checks={item.code: (item.verdict.name.lower(), item.num_compared) for item in report.outcomes},
        sentences={item.code: first_line(item) for item in report.outcomes if item.verdict},
        measures=measures_of(trace),
    )
    fixes = [bug.id for bug in manifest.upstream_bugs or () if bug.fixed]
    made = _made_by(manifest.verifier, manifest.commit, manifest.host, manifest.versions, fixes)
    return ResultStanding(path=str(path), kind="trace", verdict=cell.verdict, made_by=made, cells={"": cell})


def _of_cell(item: CellResult) -> CellStanding:
    return CellStanding(
        verdict=item.verdict, reason=(item.reason.splitlines() or [""])[0],
        checks={check.code: (check.verdict, check.num_compared) for check in item.checks},
        sentences={found.check: found.sentence for found in reversed(item.findings)},
    )  # fmt: skip


def _made_by(
    verifier: str, commit: str, host: str, versions: Mapping[str, str], fixes: Sequence[str]
) -> dict[str, str]:
    return {"verifier": f"{verifier} {commit}".strip(), "host": host, **versions, "fixes": ", ".join(fixes) or "none"}


def compared(old: ResultStanding, new: ResultStanding) -> ResultChange:
    """Differences of two results.

    Raises:
        UsageError: one is a gate and the other a trace.
    """
    if old.kind != new.kind:
        raise UsageError(f"`{old.path}` is a {old.kind} and `{new.path}` a {new.kind}: give two of a kind")
    names = [*old.cells, *(name for name in new.cells if name not in old.cells)]
    absent = CellStanding(verdict="not run", reason="it is no cell of this gate")
    pairs = [(name, old.cells.get(name, absent), new.cells.get(name, absent)) for name in names]
    made = {name: (old.made_by.get(name, "-"), new.made_by.get(name, "-")) for name in {**old.made_by, **new.made_by}}
    return ResultChange(
        old=old.path, new=new.path, decision=(old.verdict, new.verdict),
        made_by={name: pair for name, pair in made.items() if pair[0] != pair[1]},
        verdicts=[item for pair in pairs for item in _verdicts(*pair)],
        numbers=[item for pair in pairs for item in _numbers(*pair)],
        num_checks=(sum(len(item.checks) for item in old.cells.values()),
                    sum(len(item.checks) for item in new.cells.values())),
    )  # fmt: skip


def _verdicts(name: str, before: CellStanding, after: CellStanding) -> Iterator[VerdictChange]:
    if name and before.verdict != after.verdict:
        yield VerdictChange(cell=name, check="", before=before.verdict, after=after.verdict, sentence=after.reason)
    if before.checks and after.checks and "failed" not in (before.verdict, after.verdict):  # else nothing was judged
        then, now = ({code: found for code, (found, _) in side.checks.items()} for side in (before, after))
        yield from changed_verdicts(name, then, now, {**before.sentences, **after.sentences})


def changed_verdicts(
    cell: str, before: Mapping[str, str], after: Mapping[str, str], sentences: Mapping[str, str]
) -> Iterator[VerdictChange]:
    """Checks whose verdict is another one afterwards, with their sentences; one without a verdict was not run."""
    for code in sorted(before.keys() | after.keys()):
        pair = before.get(code, "not run"), after.get(code, "not run")
        if pair[0] != pair[1]:
            said = sentences.get(code, "")
            yield VerdictChange(cell=cell, check=code, before=pair[0], after=pair[1], sentence=said)


def _numbers(name: str, before: CellStanding, after: CellStanding) -> Iterator[NumberChange]:
    for code in sorted(before.checks.keys() & after.checks.keys()):
        (was, then), (verdict, now) = before.checks[code], after.checks[code]
        if then != now and was == verdict:
            yield NumberChange(cell=name, what=f"{code}: things compared", before=f"{then:,}", after=f"{now:,}")
        said = [side.sentences.get(code, "") for side in (before, after)]
        if was == verdict and said[0] != said[1]:
            yield NumberChange(cell=name, what=f"{code}: finding", before=said[0], after=said[1])
    for what in sorted(before.measures.keys() & after.measures.keys()):
        left, right = before.measures[what], after.measures[what]
        if not math.isclose(left, right, rel_tol=MOVED):
            yield NumberChange(cell=name, what=what, before=f"{left:.3g}", after=f"{right:.3g}")


def render_json(change: ResultChange) -> str:
    """One JSON object with all of it."""
    return json.dumps({"format": 1, "worse": change.worse, **asdict(change)}, indent=1, allow_nan=False) + "\n"


def render_text(change: ResultChange) -> str:
    """Versions that differ, then verdicts that got worse and better, numbers, and the answer."""
    lines = [f"old: {change.old}", f"new: {change.new}"]
    lines += [f"  {name}: {before} -> {after}" for name, (before, after) in change.made_by.items()]
    worse = sorted((item for item in change.verdicts if item.worse), key=lambda item: -BADNESS[item.after])
    parts = {
        "worse": [_line(item) for item in worse],
        "better": [_line(item) for item in change.verdicts if BADNESS[item.after] < BADNESS[item.before]],
        "other": [_line(item) for item in change.verdicts if BADNESS[item.after] == BADNESS[item.before]],
        "numbers": [_of(item.cell, f"{item.what}: {item.before} -> {item.after}") for item in change.numbers],
    }
    for title, said in parts.items():
        if said:
            lines += ["", f"{title}:", *(f"  {line}" for line in said)]
    before, after = change.decision
    decided = f"{before} -> {after}" if before != after else f"{after} as before"
    answer = "something got worse" if change.worse else "nothing got worse"
    counts = f"{change.num_checks[0]:,} checks of cells before, {change.num_checks[1]:,} after"
    lines += ["", f"{decided}; {counts}; {answer}"]
    return "\n".join(map(printable, lines)) + "\n"


def _line(item: VerdictChange) -> str:
    said = f": {item.sentence}" if item.sentence else ""
    return _of(item.cell, f"{item.check + ' ' if item.check else ''}{item.before} -> {item.after}{said}")


def _of(cell: str, text: str) -> str:
    return f"{cell}: {text}" if cell else text
