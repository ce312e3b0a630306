"""Every renderer's whole output for every way in which a run can end."""

import json
from xml.etree import ElementTree

import pytest

from tests.snapshots.reports import REPORTS
from verifier.report import render_json, render_junit, render_text


@pytest.mark.parametrize("name", REPORTS)
def test_text(name, same_as_file):
    text = render_text(REPORTS[name])
    same_as_file(f"report-{name}.txt", text)
    assert text.isascii()


@pytest.mark.parametrize("name", ["mixed", "did-not-finish"])
def test_json_is_whole_and_strict(name, same_as_file):
    text = render_json(REPORTS[name])
    same_as_file(f"report-{name}.json", text)

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    assert json.loads(text, parse_constant=refuse)["verdict"] == REPORTS[name].verdict.name.lower()


@pytest.mark.parametrize("name", ["mixed", "did-not-finish"])
def test_junit_has_one_case_per_check(name, same_as_file):
    text = render_junit(REPORTS[name])
    same_as_file(f"report-{name}.xml", text)
    suite = ElementTree.fromstring(text)
    cases = suite.findall("testcase")
    assert len(cases) == len(REPORTS[name].outcomes) + len(REPORTS[name].switched_off) == int(suite.get("tests"))


@pytest.mark.parametrize(
    ("name", "code"),
    [("holds", 0), ("violated-once", 1), ("mixed", 1), ("did-not-finish", 2), ("nothing-ran", 2)],
)
def test_exit_codes(name, code):
    assert int(REPORTS[name].exit_code) == code
