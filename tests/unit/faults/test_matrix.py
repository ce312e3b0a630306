"""The ledger of trials: written row by row, read whole, and asked what it lacks."""

import json

import msgspec
import pytest

from tests.meta.sources import ROOT
from verifier.core.ledger import append_line
from verifier.errors import UsageError
from verifier.faults.catalog import CATALOG
from verifier.faults.matrix import Code, TrialRow, lacking, latest, pages, read, rows_of_gpu_run, this_code

GROUPS, MASK = "groups-of-one", "mask-of-input-not-label"


def row(fault=GROUPS, **fields):
    found = {
        "caught": ("PCK001",), "first_bad": "pack", "fired": 3, "healed": True, "failures": (), "duration_s": 7.6,
        "date": "2026-01-02", "commit": "abc1234", "tree": "t1", "model": "tiny:qwen3", "mesh": "cp2",
        "engine": "none", "versions": {"torch": "2.11.0"},
    }  # fmt: skip
    return TrialRow(fault=fault, **found | fields)


def test_rows_are_read_as_they_were_appended(tmp_path):
    ledger = tmp_path / "ledger.jsonl"
    assert read(ledger) == []
    for item in (row(), row(MASK, duration_s=None, first_bad=None), row(commit="later")):
        append_line(ledger, item)
    assert read(ledger) == [row(), row(MASK, duration_s=None, first_bad=None), row(commit="later")]
    assert latest(read(ledger))[GROUPS].commit == "later"


@pytest.mark.parametrize("line", ["{}", "not json", json.dumps({**msgspec.to_builtins(row()), "extra": 1})])
def test_a_line_that_is_no_row_is_refused(tmp_path, line):
    ledger = tmp_path / "ledger.jsonl"
    append_line(ledger, row())
    ledger.write_text(ledger.read_text() + line + "\n")
    with pytest.raises(UsageError, match="line 2 of `"):
        read(ledger)


def test_trials_that_passed_with_this_code_are_not_run_again():
    faults = [CATALOG[GROUPS], CATALOG[MASK]]
    assert lacking([row()], faults, Code("abc1234", "t1")) == [CATALOG[MASK]]
    assert lacking([row(commit="other")], faults, Code("abc1234", "t1")) == [CATALOG[MASK]]
    assert lacking([row()], faults, Code("abc1234", "t2")) == faults
    assert lacking([row(failures=("the fault never fired",))], faults, Code("abc1234", "t1")) == faults
    assert lacking([row(tree="")], faults, Code("abc1234+", "")) == faults


def test_this_code_is_a_commit_of_this_checkout():
    code = this_code()
    assert code.commit
    assert bool(code.tree) != code.commit.endswith("+")


def test_faults_of_a_gpu_come_from_a_results_file(tmp_path):
    rows = rows_of_gpu_run(ROOT / "golden" / "gpu" / "h200-x2.json")
    assert {item.fault for item in rows} == {name for name, fault in CATALOG.items() if fault.gpus}
    (tmp_path / "other.json").write_text('{"rows": []}')
    with pytest.raises(UsageError, match="is no file of `ci/gpu`"):
        rows_of_gpu_run(tmp_path / "other.json")


def test_pages_show_what_failed_and_what_did_not_run():
    failed = row(caught=("LSS001",), first_bad="loss", failures=("PCK001 did not catch it",))
    drawn = pages([row(), failed])
    assert f"0 of {len(CATALOG)} faults" in drawn["README.md"]
    assert "| PCK001 did not | LSS001 | loss; PCK001 did not catch it | 8 |" in drawn["pack.md"]
    assert (
        f"| `{MASK}` | [verl-project/verl#3287](https://github.com/verl-project/verl/issues/3287) | no trial |"
        in (drawn["pack.md"])
    )
