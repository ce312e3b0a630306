"""Times at which adapters owe their records."""

from __future__ import annotations

from verifier.core.manifest import Facts, Manifest
from verifier.core.owed import if_adapted, if_stepped


def test_a_round_trip_exports_adapters_of_the_versions_that_it_sends() -> None:
    """Version 0 is the base alone, which an engine has from its start, or gets back where it was used before."""
    for sent in ((1, 2), (0, 1, 2)):
        facts = Facts(frozen_base=True)
        run = Manifest(command="roundtrip", config={"cycles": 2}, synced_versions=sent, facts=facts, complete=True)
        assert if_adapted(run) == if_stepped(run) == [(1, None), (2, None)]


def test_a_training_run_owes_what_its_step_made() -> None:
    step = Facts(step=3, frozen_base=True)
    run = Manifest(command="train", synced_versions=(2, 3), facts=step, complete=True)
    assert if_adapted(run) == [(2, None), (3, None)]
    assert if_stepped(run) == [(3, None)]


def test_without_adapters_a_recorded_loop_owes_none() -> None:
    run = Manifest(command="probe", synced_versions=(1,), complete=True)
    assert if_adapted(run) == if_stepped(run) == []
