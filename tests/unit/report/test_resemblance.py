"""A report names the faults that show alike, and only where the run was judged whole."""

from msgspec.structs import replace

from tests.snapshots.reports import MANIFEST
from verifier.core.comparison import Comparison
from verifier.core.finding import Finding, Outcome
from verifier.core.stage import Stage
from verifier.report import Report, render_json, render_text
from verifier.report.report import MAX_NAMED, known_faults, named, resembling


def violated(code: str, stage: Stage) -> Outcome:
    wrong = Comparison(what="w", same=False, stage=stage, owner="trainer rank 3")
    return Outcome(code=code, name="x", num_compared=1, finding=Finding.fold([wrong]))


def like(fault: str, **changes) -> Report:
    row = next(item for item in known_faults() if item.fault == fault)
    stage = Stage[row.first_bad.upper()]
    outcomes = tuple(violated(code, stage) for code in row.caught)
    mixture = replace(MANIFEST, facts=replace(MANIFEST.facts, expert_stages=(0,)))
    return Report(**{"trace": "t", "manifest": mixture, "outcomes": outcomes} | changes)


def test_every_fault_resembles_itself():
    for item in known_faults():
        assert item in resembling(item.caught, item.first_bad, item.needs)


def test_other_checks_or_another_stage_resemble_nothing():
    item = known_faults()[0]
    assert resembling([*item.caught, "ZZZ999"], item.first_bad, item.needs) == ()
    assert resembling(item.caught, "nowhere", item.needs) == ()


def test_the_text_names_a_few_and_counts_the_rest():
    alike = max((resembling(item.caught, item.first_bad, item.needs) for item in known_faults()), key=len)
    assert named(alike).count("`") == 2 * MAX_NAMED
    assert named(alike).endswith(f", and {len(alike) - MAX_NAMED} more")


def test_a_report_says_it_before_its_cause():
    report = like("ep-rank-experts-swapped")
    *_, said, cause = render_text(report).splitlines()
    assert said == "resembles: `ep-rank-experts-swapped` (https://github.com/NVIDIA-NeMo/Megatron-Bridge/issues/1716)"
    assert cause == "cause: ENG002 x: export, version 0, `w`, trainer rank 3 (tp=1 pp=1 ep=1 etp=0 cp=0 dp=0)"
    assert '"fault": "ep-rank-experts-swapped"' in render_json(report)


def test_a_dense_run_resembles_no_bug_of_experts_and_a_whole_model_none_of_adapters():
    def without(**facts) -> Report:
        return like("ep-rank-experts-swapped", manifest=replace(MANIFEST, facts=replace(MANIFEST.facts, **facts)))

    alike = [item.fault for item in without(expert_stages=(0,)).resembles]
    assert "ep-rank-experts-swapped" in alike
    assert "ep-rank-experts-swapped" not in [item.fault for item in without(expert_stages=()).resembles]
    assert all("adapters" not in item.needs for item in without(frozen_base=False).resembles)


def test_what_was_not_judged_whole_resembles_nothing():
    assert like("ep-rank-experts-swapped", switched_off=("WGT006",)).resembles == ()
    assert like("ep-rank-experts-swapped", manifest=replace(MANIFEST, complete=False)).resembles == ()
    assert Report(trace="t", manifest=MANIFEST).resembles == ()
