"""CKP002: a checkpoint has the number of the last step that its ranks trained."""

from __future__ import annotations

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.record import Record
from verifier.core.records_trainer import CheckpointNumber, TrainedUntil
from verifier.core.trace import Trace


def judged(*, step: int, optimizer_steps: int) -> tuple[Verdict, list[str]]:
    """A checkpoint of step 3 and six updates, and two ranks of which the second had trained until here."""
    records: list[Record] = [
        CheckpointNumber(name="checkpoint", version=3, step=3, optimizer_steps=6),
        TrainedUntil(name="saved", version=3, coordinate="", step=3, optimizer_steps=6),
        TrainedUntil(name="saved", version=3, rank=1, coordinate="", step=step, optimizer_steps=optimizer_steps),
    ]
    outcome = run_check(REGISTRY["CKP002"], Trace(Manifest(complete=True), records))
    assert outcome.error is None
    return outcome.verdict, [item.what for item in outcome.finding.bad] if outcome.finding else []


@pytest.mark.parametrize("step", [3, 2, 0])
def test_a_number_holds_at_the_step_or_after_steps_that_were_dropped(step: int) -> None:
    assert judged(step=step, optimizer_steps=6) == (Verdict.HOLDS, [])


def test_a_step_after_the_number_is_seen() -> None:
    assert judged(step=4, optimizer_steps=6) == (Verdict.VIOLATED, ["step on rank 1"])


def test_another_count_of_updates_is_seen() -> None:
    assert judged(step=3, optimizer_steps=8) == (Verdict.VIOLATED, ["optimizer steps on rank 1"])
