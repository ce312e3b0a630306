"""Checks and faults belong to each other: one that no fault breaks, or that no check catches, proves nothing."""

import inspect
import re

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from tests.meta import known_faults
from tests.meta.sources import ROOT
from verifier.core.check import REGISTRY
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import fault
from verifier.faults.matrix import latest, pages, read

LEDGER = ROOT / "golden" / "kill-matrix.jsonl"
PAGES = ROOT / "docs" / "kill-matrix"


def test_every_check_has_a_fault_that_breaks_it():
    broken = {code for fault in CATALOG.values() for code in fault.caught_by}
    assert sorted(REGISTRY.keys() - broken) == []


def test_every_fault_is_caught_by_checks_that_exist():
    for item in CATALOG.values():
        assert item.caught_by, f"no check has to catch {item.id}"
        assert set(item.caught_by) <= REGISTRY.keys(), item.id


def test_every_fault_says_what_it_re_enacts():
    for name, item in CATALOG.items():
        assert name == item.id
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name)
        assert item.reproduces
        assert re.fullmatch(r"[A-Z].*\.", item.summary), name
    assert len({item.summary for item in CATALOG.values()}) == len(CATALOG)


def test_every_fault_lies_in_the_folder_of_its_stage():
    for item in CATALOG.values():
        _, body = item.replacements[0]
        assert inspect.getmodule(body).__name__.startswith(f"verifier.stages.{item.stage.label}.faults"), item.id


def test_a_fault_without_a_summary_and_a_second_of_one_id_are_refused():
    with pytest.raises(ValueError, match="write the docstring first"):
        fault("x/y#1", "os.path:join(a, p)")(lambda call: None)

    def groups_of_one(call):
        """Summary."""

    with pytest.raises(ValueError, match="`groups-of-one` is taken"):
        fault("x/y#1", "os.path:join(a, p)", stage=None, caught_by=())(groups_of_one)


def test_every_fault_was_caught_in_its_own_stage_by_the_checks_that_must():
    """The last trial of each, as the ledger has it."""
    rows = latest(read(LEDGER))
    assert sorted(CATALOG.keys() - rows.keys()) == []
    for name, row in rows.items():
        assert not row.failures, name
        assert row.healed, name
        assert row.first_bad == CATALOG[name].stage.label, name
        assert set(CATALOG[name].caught_by) <= set(row.caught), name


def test_pages_are_what_the_ledger_draws():
    drawn = pages(read(LEDGER))
    assert {path.name: path.read_text() for path in PAGES.iterdir()} == drawn


def test_reports_know_what_the_ledger_knows():
    """`python -m tests.meta.known_faults` draws it anew."""
    assert known_faults.TABLE.read_text() == known_faults.drawn()
