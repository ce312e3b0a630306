"""Checks and faults belong to each other: one that no fault breaks, or that no check catches, proves nothing."""

import re

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY
from verifier.faults.catalog import CATALOG


def test_every_check_has_a_fault_that_breaks_it():
    broken = {code for fault in CATALOG.values() for code in fault.caught_by}
    assert sorted(REGISTRY.keys() - broken) == []


def test_every_fault_is_caught_by_checks_that_exist():
    for fault in CATALOG.values():
        assert fault.caught_by, f"no check has to catch {fault.id}"
        assert set(fault.caught_by) <= REGISTRY.keys(), fault.id


def test_every_fault_says_what_it_re_enacts():
    for name, fault in CATALOG.items():
        assert name == fault.id
        assert re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)+", name)
        assert fault.reproduces
        assert fault.summary
    assert len({fault.summary for fault in CATALOG.values()}) == len(CATALOG)
