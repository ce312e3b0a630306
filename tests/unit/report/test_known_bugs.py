"""A report says what was replaced upstream and which known bug explains a finding, from the manifest alone."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from verifier.core.comparison import Comparison
from verifier.core.finding import Finding, Outcome
from verifier.core.manifest import Manifest, UpstreamBug
from verifier.core.stage import Stage
from verifier.report import Report, render_json, render_junit, render_text
from verifier.report.report import explanation, stack_lines, why_it_ended


def bug(name, *, checks=("ENG001",), names=".*conv1d.*", fixed=False):
    return UpstreamBug(
        id=name, issue=name.replace("-", " #"), summary="what it does", checks=checks, names=names, fixed=fixed
    )


def outcome(*names, code="ENG001"):
    bad = [Comparison(what=name, same=False, stage=Stage.ENGINE, hint="look at the loader") for name in names]
    return Outcome(code=code, name="engine-tensor-differs", num_compared=9, finding=Finding.fold(bad))


def test_the_bug_of_this_check_and_of_all_these_names_explains():
    found = explanation(outcome("a.conv1d.weight", "b.conv1d.weight"), Manifest(upstream_bugs=[bug("vllm-44371")]))
    assert found == "vllm #44371; run again with `--fix vllm-44371` to see what is left"


def test_two_bugs_explain_what_neither_does_alone():
    bugs = [bug("vllm-44371"), bug("miles-975", names=".*A_log"), bug("vllm-1", names="other")]
    assert explanation(outcome("a.conv1d.weight", "a.A_log"), Manifest(upstream_bugs=bugs)) == (
        "vllm #44371, miles #975; run again with `--fix vllm-44371 --fix miles-975` to see what is left"
    )


@pytest.mark.parametrize(
    ("found", "bugs"),
    [
        (outcome("a.conv1d.weight", "a.in_proj.weight"), [bug("vllm-44371")]),
        (outcome("a.conv1d.weight", code="ENG002"), [bug("vllm-44371")]),
        (outcome("a.conv1d.weight"), [bug("vllm-44371", fixed=True)]),
        (outcome("a.conv1d.weight"), []),
        (Outcome(code="ENG001", name="engine-tensor-differs", num_compared=1), [bug("vllm-44371")]),
    ],
    ids=["another-name", "another-check", "fixed", "none-known", "holds"],
)
def test_nothing_else_is_explained(found, bugs):
    assert explanation(found, Manifest(upstream_bugs=bugs)) == ""


def test_a_run_that_a_bug_ended():
    asleep = bug("vllm-45620", checks=(), names="Memory usage increased")
    failed = Manifest(failure="engine rank 0 failed: AssertionError: Memory usage increased after sleeping.")
    fixed = bug("vllm-45620", checks=(), names="Memory usage increased", fixed=True)
    assert why_it_ended(replace(failed, upstream_bugs=(asleep,))).startswith("vllm #45620; run again with")
    assert why_it_ended(replace(failed, upstream_bugs=(fixed,))) == ""
    assert why_it_ended(Manifest(failure="another", upstream_bugs=(asleep,))) == why_it_ended(Manifest()) == ""


@pytest.mark.parametrize(
    ("manifest", "lines"),
    [
        (Manifest(), []),
        (Manifest(upstream_bugs=[]), [("as shipped; known upstream bugs that apply", "none")]),
        (
            Manifest(upstream_bugs=[bug("a-1"), bug("b-2")]),
            [("as shipped; known upstream bugs that apply", "a #1, b #2")],
        ),
        (Manifest(upstream_bugs=[bug("a-1", fixed=True), bug("b-2")]), [("fixes on", "a-1; not fixed: b #2")]),
        (
            Manifest(stand_ins=("one for two", "three for four"), upstream_bugs=(bug("a-1", fixed=True),)),
            [("stands in", "one for two, three for four"), ("fixes on", "a-1")],
        ),
    ],
)
def test_lines_of_the_header(manifest, lines):
    assert stack_lines(manifest) == lines


def test_every_rendering_says_it():
    manifest = Manifest(
        failure="Memory usage increased", stand_ins=("gloo for NCCL",),
        upstream_bugs=(bug("vllm-44371"), bug("vllm-45620", checks=(), names="Memory usage")),
    )  # fmt: skip
    report = Report(trace="t", manifest=manifest, outcomes=(outcome("a.conv1d.weight"),))
    text, json, junit = render_text(report), render_json(report), render_junit(report)
    assert (
        "\n  stands in: gloo for NCCL\n  as shipped; known upstream bugs that apply: vllm #44371, vllm #45620\n" in text
    )
    assert "\n  hint: vllm #44371; run again with `--fix vllm-44371` to see what is left\n" in text
    assert "(Memory usage increased); vllm #45620; run again with `--fix vllm-45620`" in text
    assert '"known_bug": "vllm #44371; run again' in json
    assert '"ended_by": "vllm #45620; run again' in json
    assert '<property name="stands in" value="gloo for NCCL" />' in junit
