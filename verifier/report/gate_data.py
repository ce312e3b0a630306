"""A gate's result for machines: JSON by a published schema, JUnit with a case per cell, annotations of GitHub."""

from __future__ import annotations

from xml.etree import ElementTree

import msgspec

from verifier.core.outputs import printable
from verifier.report.gate_result import CellResult, GateResult
from verifier.report.gate_text import waiver_line


def gate_json(result: GateResult) -> str:
    """Return the whole result as JSON; docs/gate-schema.json is its schema."""
    return msgspec.json.format(msgspec.json.encode(result), indent=1).decode() + "\n"


def gate_junit(result: GateResult) -> str:
    """Return JUnit XML: violated and failed cells are failures, inconclusive ones errors, those not run skipped."""
    outcomes = [_outcome(item) for item in result.cells]
    suite = ElementTree.Element(
        "testsuite", name="verifier gate", tests=str(len(outcomes)), failures=str(outcomes.count("failure")),
        errors=str(outcomes.count("error")), skipped=str(outcomes.count("skipped")), time=f"{result.seconds:.1f}",
        timestamp=result.began.removesuffix("Z"), hostname=printable(result.host),
    )  # fmt: skip
    properties = ElementTree.SubElement(suite, "properties")
    facts = [("decision", result.decision), ("verifier", f"{result.verifier} {result.commit}".strip())]
    facts += [("fixes", ", ".join(result.fixes))] if result.fixes else []
    facts += sorted(result.versions.items())
    facts += [("left out", f"{item.what}: {item.reason}") for item in result.left_out]
    facts += [("waiver", waiver_line(item)) for item in result.waivers]
    for name, value in facts:
        ElementTree.SubElement(properties, "property", name=printable(name), value=printable(value))
    for item, outcome in zip(result.cells, outcomes, strict=True):
        case = ElementTree.SubElement(
            suite, "testcase", classname=f"verifier.gate.{item.cell.kind}", name=printable(item.cell.id),
            time=f"{item.seconds:.1f}",
        )  # fmt: skip
        if outcome:
            message = _message(item)
            problem = ElementTree.SubElement(case, outcome, message=printable(message))
            if outcome != "skipped":
                text = "\n\n".join([found.text for found in item.unwaived] or [item.reason])
                problem.set("type", item.status)
                problem.text = "\n".join(map(printable, text.splitlines()))
        elif item.waived:
            ElementTree.SubElement(case, "system-out").text = "every violation is waived"
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def github_annotations(result: GateResult) -> str:
    """Return workflow commands of GitHub: an error for each bad cell, a warning for what was not judged or expired.

    Source:
        docs.github.com, "Workflow commands for GitHub Actions": %, CR and LF are escaped, in titles : and , too.
    """
    lines = []
    for item in result.cells:
        outcome = _outcome(item)
        if outcome:
            level = "error" if outcome == "failure" else "warning"
            lines.append(f"::{level} title={_escaped(item.cell.id, title=True)}::{_escaped(_message(item))}\n")
    expired = [item for item in result.waivers if item.expired or not item.num_waived]
    lines += [f"::warning title=waiver of {item.check}::{_escaped(waiver_line(item))}\n" for item in expired]
    return "".join(lines)


def _outcome(item: CellResult) -> str:
    """Name of a JUnit element; empty for a case that passes."""
    if item.status == "failed" or (item.status == "violated" and not item.waived and _is_bad(item)):
        return "failure"
    if item.status == "not run":
        return "skipped"
    return "error" if item.status == "inconclusive" or (item.status == "violated" and not item.waived) else ""


def _is_bad(item: CellResult) -> bool:
    return item.cell.kind == "faults" or bool(item.unwaived)


def _message(item: CellResult) -> str:
    bad = item.unwaived
    return bad[0].sentence if bad else (item.reason.splitlines() or [item.status])[0]


def _escaped(text: str, *, title: bool = False) -> str:
    text = printable(text).replace("%", "%25")
    return text.replace(":", "%3A").replace(",", "%2C") if title else text
