"""The result of a gate: its cells with their axes, verdicts, findings and reasons; every report is drawn from it."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Literal

import msgspec

from verifier.core.finding import Outcome, Verdict
from verifier.core.outputs import printable
from verifier.core.stage import Stage
from verifier.report.progress import framed

FORMAT: Literal[1] = 1
RESULT = "result.json"
"""File of the result in a gate's folder."""
Kind = Literal["golden", "roundtrip", "train", "faults"]
Status = Literal["holds", "violated", "inconclusive", "failed", "not run"]
Decision = Literal["PASS", "FAIL", "INCONCLUSIVE"]

BADNESS = {
    "PASS": 0, "holds": 0, "caught": 0, "waived": 1, "not run": 1, "inconclusive": 1, "INCONCLUSIVE": 1,
    "violated": 2, "missed": 2, "failed": 2, "FAIL": 2,
}  # fmt: skip
"""Verdict -> how bad it is. What one result does not have is "not run"."""


class Cell(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One judged run of the matrix."""

    id: str
    """Name, unlike all others of the gate, such as "roundtrip tiny:qwen3-moe fp32 tp2 vllm"."""
    kind: Kind
    model: str
    dtype: str
    """"float32" or "bfloat16"."""
    mesh: str
    """Label of the trainer's mesh, such as "tp2 ep2" or "1 rank"."""
    engine: str = ""
    """Engine and its options, such as "vllm,tp=2"; empty where none takes part."""
    transport: str = ""
    """Transport to the engine that was asked for; empty where it is chosen by the free GPUs."""
    algorithm: str = ""
    """"sft" or "grpo", of a training run."""
    fault: str = ""
    """Id of the fault that is injected."""
    stage: str = ""
    """Stage in which that fault has to be caught."""
    carries: tuple[str, ...] = ()
    """Things that it shows, in words of the field: "export", "packing", "gradient parity", "route replay" and so on."""
    words: tuple[str, ...] = ()
    """key=value of the command that does the same."""
    num_gpus: int = 1
    """Places that it takes: GPUs, or the one place of a machine without."""
    family: str = ""
    """Family of the model, or its model_type."""

    @property
    def arguments(self) -> list[str]:
        """Arguments of the command that runs the cell alone."""
        return [*(("faults", "run") if self.kind == "faults" else (self.kind,)), *self.words]

    @property
    def command(self) -> str:
        """The command that runs the cell alone, as it is typed."""
        return shlex.join(["verifier", *self.arguments])


class CheckVerdict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Verdict of one check in one cell, the worst of all its steps."""

    code: str
    name: str
    verdict: Literal["holds", "inconclusive", "violated", "caught", "missed"]
    """The last two where a fault was injected that the check has to catch."""
    num_compared: int = 0


WORDS: dict[Verdict, Literal["holds", "inconclusive", "violated"]] = {
    Verdict.HOLDS: "holds", Verdict.INCONCLUSIVE: "inconclusive", Verdict.VIOLATED: "violated",
}  # fmt: skip


def check_verdicts(reports: Iterable[Iterable[Outcome]]) -> tuple[CheckVerdict, ...]:
    """Worst verdict of each check over the outcomes of all reports, and all that it compared."""
    worst: dict[str, Outcome] = {}
    compared = Counter[str]()
    for outcome in itertools.chain.from_iterable(reports):
        compared[outcome.code] += outcome.num_compared
        worst[outcome.code] = max(worst.get(outcome.code, outcome), outcome, key=lambda item: item.verdict)
    return tuple(
        CheckVerdict(code=code, name=item.name, verdict=WORDS[item.verdict], num_compared=compared[code])
        for code, item in sorted(worst.items())
    )


class GateFinding(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One violation, or one check that could not be judged."""

    check: str
    name: str
    sentence: str
    """First line of its text, which can stand alone."""
    text: str
    """The whole finding, as `verifier replay` prints it."""
    violated: bool
    """False where the check could not be judged."""
    stage: str = ""
    """First bad stage."""
    place: tuple[int, ...] = ()
    """Place of its first mismatch in the flow of data; smaller is earlier."""
    known_bug: str = ""
    """Upstream bugs that explain all of it, and how to switch on their fixes."""
    trace: str = ""
    """Trace that it was found in, within the gate's folder."""
    waived_by: int | None = None
    """Index of the waiver that it falls under."""


class CellResult(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One cell as it ended."""

    cell: Cell
    status: Status
    """"failed": the run, or the process that it ran in, died or hung."""
    reason: str = ""
    """Why it does not hold; of a fault that was caught, where and by what."""
    checks: tuple[CheckVerdict, ...] = ()
    findings: tuple[GateFinding, ...] = ()
    """In the order in which data met them, so a cause stands before its consequences."""
    first_bad_stage: str = ""
    not_judged: tuple[str, ...] = ()
    """Clauses on what no check could judge."""
    began: str = ""
    """Time in UTC, as in ISO 8601."""
    seconds: float = 0.0
    trace: str = ""
    """Trace, or folder of a training run or a fault's trial, within the gate's folder."""
    failed_before: tuple[str, ...] = ()
    """First line of each failure of earlier attempts; a gate that goes on runs failed cells again."""
    waived: bool = False
    """Every violation of the cell is waived, and nothing else is wrong with it."""

    @property
    def unwaived(self) -> list[GateFinding]:
        """Violations that no waiver covers, causes before consequences."""
        return [item for item in self.findings if item.violated and item.waived_by is None]

    @property
    def verdict(self) -> str:
        """The status, or "waived"."""
        return "waived" if self.waived else self.status


class LeftOut(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of the matrix that the model, or this machine, does not have."""

    what: str
    reason: str


class WaiverUse(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A waiver, and what came of it."""

    check: str
    family: str
    model: str
    issue: str
    owner: str
    reason: str
    until: str
    expired: bool
    num_waived: int
    """Violations that it waives."""
    num_expired: int
    """Violations that it would waive, had it not expired."""

    @property
    def of(self) -> str:
        """The family or the model."""
        return f"family {self.family}" if self.family else self.model

    @property
    def came(self) -> str:
        """Result of it, in words."""
        if self.expired:
            return f"EXPIRED, it waives nothing, {self.num_expired:,} would fall under it"
        return (
            f"waives {self.num_waived:,}"
            if self.num_waived
            else "matched nothing: remove it if what it waives is mended"
        )

    @property
    def line(self) -> str:
        """All of it in one line."""
        return f"{self.check} of {self.of}, {self.issue}, {self.owner}: {self.reason}, until {self.until}; {self.came}"


class GateEnd(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Decision of a gate, and what it was made by and on."""

    format: Literal[1] = FORMAT
    decision: Decision
    reasons: tuple[str, ...]
    """Sentences; none of a gate that passes."""
    began: str
    ended: str
    """Times in UTC, as in ISO 8601; of the card of a gate that was broken off, no end."""
    host: str
    tier: str
    gpus: tuple[str, ...]
    verifier: str
    commit: str
    """Empty outside of a checkout; ends in "+" where files of the package differed from it."""
    versions: dict[str, str]
    """Upstream packages and their versions."""
    fixes: tuple[str, ...]
    """Fixes of upstream bugs that were asked for."""
    waivers: tuple[WaiverUse, ...]


class GateResult(GateEnd, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A gate as it ended."""

    first_bad_stage: str
    """Earliest stage of all violations that are not waived; empty without one."""
    models: tuple[str, ...]
    budget_minutes: float | None
    seconds: float
    """Seconds of all cells, those of earlier attempts included."""
    folder: str
    cells: tuple[CellResult, ...]
    left_out: tuple[LeftOut, ...]

    @property
    def counted(self) -> str:
        """Number of cells, and of each verdict: "3 cells: 2 holds, 1 waived"."""
        words = [item.verdict for item in self.cells]
        said = ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))
        return f"{len(words)} cell{'' if len(words) == 1 else 's'}: {said}"

    @property
    def bad_cells(self) -> list[CellResult]:
        """Cells with violations that no waiver covers, those of faults apart; the earliest stage first."""
        order = {stage.label: int(stage) for stage in Stage}
        bad = [item for item in self.cells if item.cell.kind != "faults" and item.unwaived]
        return sorted(bad, key=lambda item: (order.get(item.unwaived[0].stage, len(order)), item.cell.id))


MAX_FINDINGS = 10
"""Findings that are shown whole; `--json` has all."""


def render_gate(result: GateResult) -> str:
    """Return the whole text."""
    decided = [f"{result.decision}: {result.counted}"]
    if result.first_bad_stage:
        decided.append(f"first bad stage: {result.first_bad_stage}")
    decided += [f"  {reason}" for reason in result.reasons]
    earlier = [f"{item.cell.id}: {why}" for item in result.cells for why in item.failed_before]
    parts = [
        _lines(decided),
        _table(result.cells),
        *_findings(result),
        _lines(f"failed in an earlier attempt: {item}" for item in earlier),
        _lines(f"waiver: {item.line}" for item in result.waivers),
        left_out(result.left_out),
        _end(result),
    ]
    return "\n".join(part for part in parts if part)


def _lines(texts: Iterable[str]) -> str:
    return "".join(f"{printable(text)}\n" for text in texts)


def _table(cells: Sequence[CellResult]) -> str:
    rows = [
        (
            item.cell.id, item.verdict, str(len(item.checks) or "-"), item.first_bad_stage or "-",
            f"{item.seconds:.0f}" if item.seconds else "-",
        )
        for item in cells
    ]  # fmt: skip
    return framed(("cell", "verdict", "checks", "first bad", "s"), rows, left=("cell", "verdict", "first bad"))


def _findings(result: GateResult) -> list[str]:
    """Each root of a cell whole, with its consequences in one line; the earliest in the flow of data first."""
    bad = result.bad_cells
    parts = [_finding(cell, cell.unwaived) for cell in bad[:MAX_FINDINGS]]
    if len(bad) > MAX_FINDINGS:
        parts.append(f"{len(bad) - MAX_FINDINGS} more cells are left out here; `--json` holds all\n")
    failed = [cell for cell in result.cells if cell.status == "failed"]
    return parts + [_block(cell.cell, cell.reason) for cell in failed[:MAX_FINDINGS]]


def _finding(result: CellResult, findings: Sequence[GateFinding]) -> str:
    text = findings[0].text
    if findings[1:]:
        later = "\n".join(f"  {item.sentence}" for item in findings[1:])
        text += f"\nafter it in the flow of data, so perhaps its consequences:\n{later}"
    return _block(result.cell, text)


def _block(cell: Cell, text: str) -> str:
    lines = "\n".join(f"  {printable(line)}" for line in text.splitlines())
    return f"{printable(cell.id)} (`{printable(cell.command)}`)\n{lines}\n"


def left_out(items: Sequence[LeftOut]) -> str:
    """Lines on what the matrix does not have."""
    return _lines(f"left out: {item.what}: {item.reason}" for item in items)


def _end(result: GateResult) -> str:
    stack = ", ".join(f"{name} {version}" for name, version in sorted(result.versions.items()))
    machine = ", ".join([result.host, *result.gpus])
    code = f"verifier {result.verifier}" + (f" at {result.commit}" if result.commit else "")
    fixes = f"fixes on: {', '.join(result.fixes)}\n" if result.fixes else ""
    decided = ": ".join([result.decision, *map(printable, result.reasons[:1])])
    return (
        f"{result.began} to {result.ended}, {result.seconds:,.0f} s of cells; {machine}\n{code}; {stack}\n{fixes}"
        f"gate: {result.folder}; a card of each model in its folder `cards`\n{decided}\n"
    )
