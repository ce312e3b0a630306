"""The report as JUnit XML: one test case per check, so that any CI can draw it."""

from __future__ import annotations

import re
from xml.etree import ElementTree

from verifier.core.finding import Verdict
from verifier.report.known_bugs import stack_lines
from verifier.report.render_text import first_line, render_outcome
from verifier.report.report import Report

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def render_junit(report: Report) -> str:
    """VIOLATED is a failure, INCONCLUSIVE an error, a switched-off check is skipped with that reason."""
    verdicts = [item.verdict for item in report.outcomes]
    suite = ElementTree.Element(
        "testsuite",
        name="verifier",
        tests=str(len(report.outcomes) + len(report.switched_off)),
        failures=str(verdicts.count(Verdict.VIOLATED)),
        errors=str(verdicts.count(Verdict.INCONCLUSIVE)),
        skipped=str(len(report.switched_off)),
    )
    if lines := stack_lines(report.manifest):
        properties = ElementTree.SubElement(suite, "properties")
        for name, value in lines:
            ElementTree.SubElement(properties, "property", name=name, value=_NOT_XML.sub("?", value))
    group = f"verifier.{report.manifest.command}"
    for outcome in report.outcomes:
        case = ElementTree.SubElement(suite, "testcase", classname=group, name=f"{outcome.code} {outcome.name}")
        if outcome.verdict is Verdict.HOLDS:
            continue
        tag = "failure" if outcome.verdict is Verdict.VIOLATED else "error"
        problem = ElementTree.SubElement(
            case, tag, type=outcome.verdict.name.lower(), message=_NOT_XML.sub("?", first_line(outcome))
        )
        problem.text = _NOT_XML.sub("?", render_outcome(outcome, report.trace, report.manifest))
    for code in report.switched_off:
        case = ElementTree.SubElement(suite, "testcase", classname=group, name=code)
        ElementTree.SubElement(case, "skipped", message="switched off for this run")
    if not report.is_complete:
        ElementTree.SubElement(suite, "system-err").text = "the run did not finish: its trace is not complete"
    ElementTree.indent(suite)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"
