"""A computed bound that is exceeded by little: suspected where all mismatches are such; what becomes of it."""

import json
import math
from collections.abc import Iterator

import pytest

from verifier.core.check import Check
from verifier.core.comparison import SUSPECTED, Comparison
from verifier.core.finding import GREATEST_BIN, LEAST_BIN, Shares, Verdict
from verifier.core.manifest import Manifest
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.report import Report, render_json, render_text, report_of
from verifier.stages.export.records import ExportedTensor

EXACT = None


def report(*shares: float | None, command: str = "train", versions: tuple[int, ...] = ()) -> Report:
    """Report on one check whose comparisons take these shares of their bound; an exact one mismatches."""

    def gap_is_small(trace: Trace) -> Iterator[Comparison]:
        """A gap is small."""
        for number, share in enumerate(shares):
            yield Comparison(
                what=f"gap {number}", same=share is not None and share <= 1, share=share, stage=Stage.EXPORT,
                version=versions[number] if versions else 0, badness=0.5,
            )  # fmt: skip

    check = Check(code="ABC001", name="a-b", needs=(ExportedTensor,), fn=gap_is_small)
    tensor = ExportedTensor(name="a", digest="vd1:" + "0" * 32, dtype="float32", shape=())
    manifest = Manifest(command=command, complete=True)
    return report_of(Trace(manifest, [tensor]), "t", checks={"ABC001": check})


@pytest.mark.parametrize(
    ("shares", "suspected"),
    [
        ((0.5, 1.0), False), ((0.5, 1.3), True), ((1.3, 3.9), True), ((1.3, SUSPECTED), False),
        ((1.3, math.inf), False), ((1.3, EXACT), False), ((EXACT,), False),
    ],
    ids=["holds", "little", "all-little", "beyond-the-factor", "not-finite", "one-exact", "exact"],
)  # fmt: skip
def test_a_check_is_suspected_where_every_mismatch_is_within_the_factor(shares, suspected):
    found = report(*shares)
    assert found.outcomes[0].suspected is suspected
    assert list(found.suspected) == (["ABC001"] if suspected else [])
    assert found.verdict is (Verdict.HOLDS if max(s or 9 for s in shares) <= 1 else Verdict.VIOLATED)


def test_the_finding_of_a_finished_trace_says_so():
    text = render_text(report(0.5, 1.3))
    assert "suspected : 1.3 times its bound, `gap 1` in version 0: judge another step before you trust it" in text
    assert "suspected" not in render_text(report(0.5, 5.0))


@pytest.mark.parametrize(
    ("shares", "verdict"),
    [
        ((0.5, 1.3, 0.5), Verdict.INCONCLUSIVE), ((0.5, 0.5, 1.3), Verdict.VIOLATED),
        ((1.3, 1.2, 0.5), Verdict.VIOLATED), ((0.5, 9.0, 0.5), Verdict.VIOLATED), ((1.3, EXACT, 0.5), Verdict.VIOLATED),
    ],
    ids=["one-version-alone", "the-last-version", "two-versions", "beyond-the-factor", "an-exact-one-too"],
)  # fmt: skip
def test_a_later_version_of_a_recorded_loop_is_fresh_evidence(shares, verdict):
    assert report(*shares, command="probe", versions=(0, 1, 2)).verdict is verdict
    assert report(*shares, command="roundtrip", versions=(0, 1, 2)).verdict is Verdict.VIOLATED


def test_a_loop_that_is_inconclusive_says_why():
    found = report(0.5, 1.3, 0.5, command="probe", versions=(0, 1, 2))
    said = "not judged: ABC001 (suspected: 1.3 times its bound, `gap 1` in version 1 alone, later ones hold;"
    assert said in render_text(found)
    assert found.violated == []


def test_shares_are_counted_by_powers_of_two_and_go_into_the_report():
    found = Shares.of([0.0, -1.0, 0.25, 0.26, 1.0, 1.3, math.inf, math.nan])
    bins = {LEAST_BIN: 2, -2: 1, -1: 1, 0: 1, 1: 1, GREATEST_BIN: 2}
    assert (found.count, dict(found.bins)) == (8, bins)
    written = json.loads(render_json(report(0.5, 1.3)))["outcomes"][0]
    assert written["shares"] == {"count": 2, "greatest": 1.3, "bins": {"-1": 1, "1": 1}}
    assert written["suspected"] is True
