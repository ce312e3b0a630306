"""Every check on hand-written traces: it holds, it is violated with exactly this text, it can be inconclusive."""

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import BROKEN, MANIFEST, clean, make_trace
from verifier.core.check import REGISTRY, is_owed, needed, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.report.render_text import render_outcome

CODES = sorted(REGISTRY)
SECTIONS = [
    "What it checks:",
    "Why it matters:",
    "Evidence:",
    "Tolerance and its source:",
    "Where to look:",
    "What it does not catch:",
    "References:",
]


def owed(code, run=MANIFEST):
    """What the check needs and such a run is to have."""
    return [need for need in REGISTRY[code].needs if is_owed(need, run)]


@pytest.mark.parametrize("code", CODES)
def test_holds_on_the_clean_run(code):
    outcome = run_check(REGISTRY[code], make_trace(clean()))
    assert (outcome.verdict, outcome.error, outcome.not_recorded) == (Verdict.HOLDS, None, ()), outcome
    assert outcome.num_compared > 0


@pytest.mark.parametrize("code", CODES)
def test_is_violated_by_the_smallest_wrong_thing(code, same_as_file):
    assert code in BROKEN, f"check {code} has no trace that breaks it"
    outcome = run_check(REGISTRY[code], make_trace(BROKEN[code]))
    assert outcome.verdict is Verdict.VIOLATED, outcome
    assert outcome.finding.count == 1
    text = render_outcome(outcome, "traces/t", Manifest()) + "\n"
    same_as_file(f"check-{code}.txt", text)
    assert text.isascii()
    assert text.count("\n") <= 12


@pytest.mark.parametrize("code", CODES)
def test_is_inconclusive_where_nothing_was_recorded(code):
    outcome = run_check(REGISTRY[code], Trace(Manifest(), []))
    assert outcome.verdict is Verdict.INCONCLUSIVE
    assert len(outcome.not_recorded) == len(owed(code, Manifest()))


@pytest.mark.parametrize(("code", "need"), [(code, need) for code in CODES for need in owed(code)])
def test_is_inconclusive_where_one_side_was_not_recorded(code, need):
    half = [item for item in clean() if not isinstance(item, need)]
    outcome = run_check(REGISTRY[code], make_trace(half))
    assert outcome.verdict is Verdict.INCONCLUSIVE
    assert needed(need) in outcome.not_recorded


@pytest.mark.parametrize("code", CODES)
def test_has_a_whole_page(code):
    page = REGISTRY[code].page
    found = [section for section in SECTIONS if section in page]
    assert {*SECTIONS} - {*found} <= {"Where to look:"}  # where each comparison says its own
    assert [page.index(section) for section in found] == sorted(page.index(section) for section in found)


def test_pages_name_only_codes_that_exist():
    import re

    for item in REGISTRY.values():
        assert set(re.findall(r"\b[A-Z]{3}\d{3}\b", item.page)) <= REGISTRY.keys(), item.code


def test_codes_and_names_are_well_formed():
    import re

    for code, item in REGISTRY.items():
        assert re.fullmatch(r"[A-Z]{3}\d{3}", code)
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", item.name)
        assert not item.name.startswith(("check-", "no-"))
    assert len({item.name for item in REGISTRY.values()}) == len(REGISTRY)
