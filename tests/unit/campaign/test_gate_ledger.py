"""The ledger: whole lines, one folder for one gate, identities, and what a gate that goes on runs again."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.unit.campaign.gate_cases import CELL, FAULT, violated
from verifier.campaign.gate.decision import LEDGER, identity_of, opened_ledger
from verifier.errors import UsageError
from verifier.report.gate_result import CellResult

MACHINE = {"code": "abc", "versions": {"torch": "2.11.0"}, "tier": "cpu", "gpus": ()}


def test_rows_come_back(tmp_path):
    with opened_ledger(tmp_path / "gate") as ledger:
        ledger.add("a", violated())
        ledger.add("b", CellResult(cell=FAULT, status="holds"))
    with opened_ledger(tmp_path / "gate") as again:
        assert again.rows == {"a": violated(), "b": CellResult(cell=FAULT, status="holds")}
        assert again.done == {"a", "b"}


def test_a_half_written_line_is_dropped(tmp_path):
    with opened_ledger(tmp_path / "gate") as ledger:
        ledger.add("a", violated())
    file = tmp_path / "gate" / LEDGER
    whole = file.read_bytes()
    file.write_bytes(whole + whole[: len(whole) // 2])
    with opened_ledger(tmp_path / "gate") as again:
        assert list(again.rows) == ["a"]
        again.add("b", violated())
    assert len(file.read_bytes().splitlines()) == 2


def test_a_failed_cell_runs_again_and_says_that_it_failed(tmp_path):
    with opened_ledger(tmp_path / "gate") as ledger:
        ledger.add("a", CellResult(cell=CELL, status="failed", reason="killed by SIGKILL; its last words:\nx"))
        assert ledger.done == set()
        ledger.add("a", CellResult(cell=CELL, status="holds"))
    with opened_ledger(tmp_path / "gate") as again:
        assert again.done == {"a"}
        assert again.rows["a"].failed_before == ("killed by SIGKILL; its last words:",)


def test_a_folder_in_use_is_refused(tmp_path):
    with opened_ledger(tmp_path / "gate"), pytest.raises(UsageError, match="is in use by another gate"):
        opened_ledger(tmp_path / "gate").__enter__()


def test_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("x")
    with pytest.raises(UsageError, match="is no folder of a gate and not empty: choose another --folder"):
        opened_ledger(tmp_path).__enter__()


def test_a_line_that_is_no_row_is_refused(tmp_path):
    with opened_ledger(tmp_path / "gate"):
        (tmp_path / "gate" / LEDGER).write_text("{}\n")
    with pytest.raises(UsageError, match=r"line 1 of .* is no row of a gate"):
        opened_ledger(tmp_path / "gate").__enter__()


def test_an_identity_changes_with_the_cell_the_code_the_versions_and_the_files(tmp_path):
    local = replace(CELL, model=str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    before = identity_of(local, MACHINE)
    (tmp_path / "config.json").write_text("{ }")
    found = {
        before, identity_of(local, MACHINE), identity_of(CELL, MACHINE), identity_of(CELL, {**MACHINE, "code": "abd"}),
        identity_of(CELL, {**MACHINE, "versions": {"torch": "2.12.0"}}), identity_of(replace(CELL, words=()), MACHINE),
    }  # fmt: skip
    assert len(found) == 6
    assert identity_of(CELL, MACHINE) == identity_of(CELL, dict(MACHINE))
