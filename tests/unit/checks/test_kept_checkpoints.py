"""CKP003: the last checkpoints of a run are there, and it goes on from the newest."""

from __future__ import annotations

from typing import Any

import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.records_trainer import KeptCheckpoints
from verifier.core.trace import Trace


def judged(version: int, *found: int, every: int = 2, keep: int = 2, **values: Any) -> list[str]:
    """What is wrong with the checkpoints that are found after a step."""
    manifest = Manifest(complete=True, config={"checkpoint": {"every": every, "keep": keep}})
    record = KeptCheckpoints(name="checkpoints", version=version, found=found, **values)
    outcome = run_check(REGISTRY["CKP003"], Trace(manifest, [record]))
    assert outcome.error is None
    assert outcome.verdict in (Verdict.HOLDS, Verdict.VIOLATED)
    return [item.what for item in outcome.finding.bad] if outcome.finding else []


@pytest.mark.parametrize(
    ("version", "found", "values"),
    [
        (0, (), {}), (1, (), {}), (2, (2,), {}), (5, (2, 4), {}), (7, (4, 6), {}),
        (6, (2, 4), {"writing": 6}),  # the oldest goes once the newest is whole
        (7, (6, 7), {"ended": True}), (3, (3,), {"ended": True, "every": 0}), (3, (), {"every": 0}),
        (6, (6,), {"keep": 1}),
        (4, (4,), {"begun": 4, "present": (2, 4)}),
        (5, (2, 3, 4, 5), {"begun": 5, "present": (2, 3, 4, 5)}),  # the process before it kept more
        (6, (5, 6), {"begun": 5, "present": (2, 3, 4, 5)}),
        (5, (5,), {"begun": 5, "present": (5,), "ended": True}),
    ],
)  # fmt: skip
def test_the_last_ones_hold(version: int, found: tuple[int, ...], values: dict[str, Any]) -> None:
    assert judged(version, *found, **values) == []


@pytest.mark.parametrize(
    ("version", "found", "values"),
    [
        (6, (2, 4), {}),  # the newest is gone
        (6, (6,), {}), (6, (2, 4, 6), {}),
        (7, (4, 6), {"ended": True}), (2, (2, 4), {}), (4, (2,), {"writing": 2}),
        (6, (4,), {"begun": 4, "present": (4,), "writing": 4}),
        (6, (2, 4, 5, 6), {"begun": 5, "present": (2, 4, 5)}),
    ],
)  # fmt: skip
def test_another_set_is_seen(version: int, found: tuple[int, ...], values: dict[str, Any]) -> None:
    assert judged(version, *found, **values) == ["checkpoints"]


def test_a_run_that_goes_on_from_an_older_one_is_seen() -> None:
    assert judged(2, 2, begun=2, present=(2, 4)) == ["gone on from"]
    assert judged(0, begun=0, present=(2,)) == ["gone on from"]
