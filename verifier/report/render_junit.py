"""JUnit XML, one case per check or per cell, so that any CI can draw it; and annotations of GitHub."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

from verifier.core.finding import Verdict
from verifier.core.outputs import printable
from verifier.report.gate_result import CellResult, GateResult
from verifier.report.render_text import first_line, provenance, render_outcome
from verifier.report.report import Report, stack_lines


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One case of a suite."""

    group: str
    name: str
    outcome: str = ""
    """"failure", "error" or "skipped"; empty for one that passes."""
    message: str = ""
    kind: str = ""
    """Verdict or status of a failure or an error."""
    text: str = ""
    seconds: float | None = None


def render_junit(report: Report) -> str:
    """VIOLATED is a failure, INCONCLUSIVE an error, a switched-off check is skipped with that reason."""
    group = f"verifier.{report.manifest.command}"
    tags = {Verdict.HOLDS: "", Verdict.VIOLATED: "failure", Verdict.INCONCLUSIVE: "error"}
    cases = [
        _Case(
            group=group,
            name=f"{item.code} {item.name}",
            outcome=tags[item.verdict],
            message=first_line(item),
            kind=item.verdict.name.lower(),
            text=render_outcome(item, report.trace, report.manifest),
        )
        for item in report.outcomes
    ]
    off = "switched off for this run"
    cases += [_Case(group=group, name=code, outcome="skipped", message=off) for code in report.switched_off]
    if report.unreached:
        name = "checks that the run did not come to"
        cases.append(_Case(group=group, name=name, outcome="skipped", message=report.not_judged[-1]))
    wider = [("held in a wider dtype with the same values", name) for name in report.widened[:1]]
    facts = [*stack_lines(report.manifest), *provenance(report.manifest), *wider]
    broken = "" if report.manifest.complete else "the run did not finish: its trace is not complete"
    return _suite("verifier", cases, facts, broken)


def gate_junit(result: GateResult) -> str:
    """Violated and failed cells are failures, inconclusive ones errors, those not run skipped."""
    cases = [
        _Case(
            group=f"verifier.gate.{item.cell.kind}",
            name=item.cell.id,
            outcome=_outcome(item),
            message="every violation is waived" if item.waived else _message(item),
            kind=item.status,
            text="\n\n".join([found.text for found in item.unwaived] or [item.reason]),
            seconds=item.seconds,
        )
        for item in result.cells
    ]
    facts = [("decision", result.decision), ("verifier", f"{result.verifier} {result.commit}".strip())]
    facts += [("fixes", ", ".join(result.fixes))] if result.fixes else []
    facts += sorted(result.versions.items())
    facts += [("left out", f"{item.what}: {item.reason}") for item in result.left_out]
    facts += [("waiver", item.line) for item in result.waivers]
    began, host = result.began.removesuffix("Z"), printable(result.host)
    return _suite("verifier gate", cases, facts, time=f"{result.seconds:.1f}", timestamp=began, hostname=host)


def _suite(
    name: str, cases: Sequence[_Case], facts: Iterable[tuple[str, str]], broken: str = "", **attributes: str
) -> str:
    outcomes = [item.outcome for item in cases]
    counts = {"failures": "failure", "errors": "error", "skipped": "skipped"}
    numbers = {key: str(outcomes.count(outcome)) for key, outcome in counts.items()}
    suite = ElementTree.Element("testsuite", {"name": name, "tests": str(len(cases)), **numbers, **attributes})
    if facts := [(key, value) for key, value in facts]:
        properties = ElementTree.SubElement(suite, "properties")
        for key, value in facts:
            ElementTree.SubElement(properties, "property", name=printable(key), value=printable(value))
    for item in cases:
        case = ElementTree.SubElement(suite, "testcase", classname=printable(item.group), name=printable(item.name))
        if item.seconds is not None:
            case.set("time", f"{item.seconds:.1f}")
        if item.outcome in ("failure", "error"):
            problem = ElementTree.SubElement(case, item.outcome, type=item.kind, message=printable(item.message))
            problem.text = "\n".join(map(printable, item.text.splitlines()))
        elif item.outcome:
            ElementTree.SubElement(case, item.outcome, message=printable(item.message))
        elif item.seconds is not None and item.kind == "violated":
            ElementTree.SubElement(case, "system-out").text = item.message
    if broken:
        ElementTree.SubElement(suite, "system-err").text = broken
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def github_annotations(result: GateResult) -> str:
    """Return workflow commands of GitHub: an error for each bad cell, a warning for what was not judged or expired.

    Source:
        docs.github.com, "Workflow commands for GitHub Actions": %, CR and LF are escaped, in titles : and , too.
    """
    lines = []
    for item in result.cells:
        if outcome := _outcome(item):
            level = "error" if outcome == "failure" else "warning"
            lines.append(f"::{level} title={_escaped(item.cell.id, title=True)}::{_escaped(_message(item))}\n")
    expired = [item for item in result.waivers if item.expired or not item.num_waived]
    lines += [f"::warning title=waiver of {item.check}::{_escaped(item.line)}\n" for item in expired]
    return "".join(lines)


def _outcome(item: CellResult) -> str:
    if item.status == "failed":
        return "failure"
    if item.status == "violated" and not item.waived:
        return "failure" if item.cell.kind == "faults" or item.unwaived else "error"
    return {"not run": "skipped", "inconclusive": "error"}.get(item.status, "")


def _message(item: CellResult) -> str:
    return item.unwaived[0].sentence if item.unwaived else (item.reason.splitlines() or [item.status])[0]


def _escaped(text: str, *, title: bool = False) -> str:
    text = printable(text).replace("%", "%25")
    return text.replace(":", "%3A").replace(",", "%2C") if title else text
