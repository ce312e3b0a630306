"""The pages of a trace and of a training run, and their charts, from recorded evidence."""

import re

import numpy as np
import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from tests.snapshots.check_traces import BROKEN, MANIFEST, clean
from tests.unit.report.pages import metrics, parsed
from tests.unit.report.test_live_and_replayed import stored
from verifier.cli.app import run
from verifier.core.trace import Trace
from verifier.report.charts import MAX_DOTS, charts_of, measures_of, thinned
from verifier.report.pages import page_of
from verifier.report.render_html import html
from verifier.stages.logprob.records import OracleLogprobs, TrainerLogprobs
from verifier.stages.rollout.records import EngineLogprobs


def test_a_clean_trace_has_every_check_and_its_charts(tmp_path):
    stored(tmp_path / "t", clean())
    page = page_of(tmp_path / "t")
    found = parsed(html(page))
    assert (page.decision, page.roots) == ("holds", ())
    assert ("header", "class", "good") in found.attributes
    assert {"Log-probabilities of trainer and engine", "Gradients by layer"} <= {chart.title for chart in page.charts}
    assert found.tags.count("svg") == len(page.charts)
    num = sum(map(len, page.groups.values()))
    assert page.summary.startswith(f"holds: {num} of {num} checks hold")
    assert found.text.count("replay: verifier replay ") == num


@pytest.mark.parametrize("code", ["WGT001", "LGP001", "LSS001"])
def test_a_violation_leads_with_its_root_and_how_to_replay_it(code, tmp_path):
    stored(tmp_path / "t", BROKEN[code])
    page = page_of(tmp_path / "t")
    assert page.decision == "violated"
    root = page.roots[0]
    assert root.stage == page.stage
    codes = [item.title.split()[0] for item in (*page.roots, *page.roots[-1].later)]
    assert code in codes
    assert root.replay.startswith(f"verifier replay {tmp_path / 't'} --check {codes[0]}")
    assert ("header", "class", "bad") in parsed(html(page)).attributes


def scored_trace(trainer, engine):
    """A trace in which both sides scored one sequence."""
    arrays = {"t": trainer, "e": engine, "o": engine}
    shared = {"name": "scored", "version": 0, "lengths": (len(trainer),)}
    records = [
        TrainerLogprobs(array="t", rank=0, role="trainer", **shared),
        EngineLogprobs(array="e", rank=0, role="engine", **shared),
        OracleLogprobs(array="o", rank=0, role="oracle", **shared),
    ]
    manifest = replace(MANIFEST, dtype="float32")
    return Trace(manifest, records, lambda key: {"array": np.asarray(arrays[key], np.float32)})


def test_tokens_beyond_the_bounds_of_both_sides_have_a_colour_of_their_own():
    charts = charts_of(scored_trace([-1.0, -2.0, -3.0], [-1.0, -2.5, -3.000001]))
    scatter, by_position, by_version = charts
    assert [(item.name, len(item.points)) for item in scatter.series[:2]] == [
        ("tokens", 2), ("beyond what both sides may differ by", 1),
    ]  # fmt: skip
    assert dict(by_version.series[1].points)[0.0] == pytest.approx(0.5)
    assert max(value for _, value in by_position.series[1].points) == pytest.approx(0.5)


def test_values_that_are_not_finite_are_counted_and_not_drawn():
    trace = scored_trace([-1.0, np.nan, -3.0], [-1.5, -2.0, -np.inf])
    assert [len(item.points) for item in charts_of(trace)[0].series] == [0, 1, 2]
    assert "nan" not in html_of(trace)


def html_of(trace):
    from verifier.report import report_of
    from verifier.report.pages import page_of_report

    return "".join(re.findall(r' d="[^"]*"', html(page_of_report(report_of(trace, "t"), trace))))


def test_measures_are_named_with_their_units():
    assert measures_of(scored_trace([-1.0, -2.0], [-1.0, -2.5])) == {
        "trainer against engine, `scored`, version 0: mean, nats": pytest.approx(0.25),
        "trainer against engine, `scored`, version 0: greatest, nats": pytest.approx(0.5),
    }


def test_thinned_keeps_what_weighs_most():
    points = [(float(number), float(number % 7)) for number in range(10 * MAX_DOTS)]
    kept = thinned(points, lambda point: point[0])
    assert len(kept) <= MAX_DOTS
    assert points[-1] in kept


def test_the_page_of_a_training_run_is_written_of_its_folder(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").write_text(metrics(30))
    stored(tmp_path / "run" / "steps" / "000030", BROKEN["WGT001"])
    assert run(["report", "html", str(tmp_path / "run"), str(tmp_path / "page.html")]) == 0
    page = page_of(tmp_path / "run")
    assert [chart.title for chart in page.charts] == [
        "Reward", "Loss", "Mismatch of trainer and engine over the run", "Mismatch by position", "Time by stage",
        "Bandwidth of the weight sync", "Memory",
    ]  # fmt: skip
    assert page.decision == "violated"
    assert page.roots[0].place == "step 30"
    parsed((tmp_path / "page.html").read_text())


def test_a_run_that_recorded_nothing_is_inconclusive(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(metrics(1))
    assert page_of(tmp_path).decision == "inconclusive"


def test_replay_writes_the_page_beside_its_text(tmp_path, capsys):
    stored(tmp_path / "t", clean())
    assert run(["replay", str(tmp_path / "t"), "-q", "--html", str(tmp_path / "page.html")]) == 0
    assert capsys.readouterr().out.startswith("holds: ")
    parsed((tmp_path / "page.html").read_text())
    assert run(["replay", str(tmp_path / "t"), "--html", "-"]) == 0
    assert capsys.readouterr().out == (tmp_path / "page.html").read_text()


@pytest.mark.parametrize("content", [b"{}", b"[" * 100_000, b"\xff"])
def test_what_is_no_result_is_refused_in_one_sentence(content, tmp_path, capsys):
    (tmp_path / "x.json").write_bytes(content)
    assert run(["report", "html", str(tmp_path / "x.json"), str(tmp_path / "page.html")]) == 4
    assert "is not the JSON that `verifier gate --json` writes" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()
