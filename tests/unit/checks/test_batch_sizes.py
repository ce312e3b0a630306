"""Sizes of a step by DAT007, on hand-written steps: mini-batches, passes, dropped rollouts, turns of a trajectory.

What this does not exercise: real runs (tests/dist/train_clean_case.py), and bugs that DAT007 catches (tests/faults).
"""

from __future__ import annotations

import numpy as np
import pytest

from verifier.checks.batch_sizes import step_of_another_size
from verifier.core.manifest import Manifest
from verifier.core.record import Record
from verifier.core.records_policy import Advantages, PolicyColumns
from verifier.core.records_trainer import LossColumns, StepSizes
from verifier.core.trace import Trace

IDS = ("a", "b", "c", "d", "e")


def step(
    updates: dict[int, str], *, kept: str = "abcde", mini_batches: int = 2, epochs: int = 1, group_size: int = 5,
    trajectories: tuple[str, ...] = IDS, live: bool = False, batch_size: int = 1,
) -> list[str]:  # fmt: skip
    """What is wrong with a step of one group of five rollouts; `updates` has the rollouts of each, by number."""
    mask = np.array([name in kept for name in IDS])
    records: list[Record] = [
        StepSizes(
            name="step", version=1, batch_size=batch_size, group_size=group_size, mini_batches=mini_batches,
            epochs=epochs, live=live,
        ),
        Advantages(
            name="advantages", version=1, estimator="grpo", ids=IDS, groups=("g",) * 5, trajectories=trajectories,
            rewards=(0.0,) * 5, penalties=(0.0,) * 5, token_counts=(1,) * 5, advantages=(0.0,) * 5,
        ),
        PolicyColumns(
            name="policy inputs", version=1, ids=IDS, lengths=(1,) * 5, ratio_over="old", weight_level="",
            weight_cap=2.0, mask_level="", mask_low=0.5, mask_high=2.0, max_staleness=0, trained_version=0, array="0",
        ),
        *(
            LossColumns(
                name=f"update {number}", version=1, aggregation="token_mean", ids=tuple(ids), groups=("g",) * len(ids),
                lengths=(1,) * len(ids),
            )
            for number, ids in updates.items()
        ),
    ]  # fmt: skip
    trace = Trace(Manifest(), records, lambda record: {"mask": mask})
    return [item.what for item in step_of_another_size(trace) if not item.same]


@pytest.mark.parametrize(
    ("updates", "knobs"),
    [
        ({1: "abc", 2: "de"}, {}),
        ({7: "abc", 8: "de", 9: "abc", 10: "de"}, {"epochs": 2}),
        ({3: "de"}, {"kept": "e"}),
        ({3: "de", 4: "de"}, {"kept": "de", "epochs": 2}),
        ({}, {"kept": ""}),
        ({1: "ab", 2: "c", 3: "d", 4: "e"}, {"mini_batches": 4}),
        ({1: "abc", 2: "de"}, {"trajectories": ("s", "s", "t", "t", "t"), "group_size": 2, "live": True}),
    ],
)
def test_holds(updates, knobs):
    assert not step(updates, **knobs)


@pytest.mark.parametrize(
    ("updates", "knobs", "wrong"),
    [
        ({1: "abcde"}, {}, ["updates", "update 1"]),
        ({1: "abc", 2: "de"}, {"epochs": 2}, ["updates"]),
        ({1: "abc", 3: "de"}, {}, ["update 3"]),
        ({1: "abd", 2: "ce"}, {}, ["update 1", "update 2"]),
        ({1: "abc", 2: "de"}, {"group_size": 6}, ["answers to prompt `g`"]),
        ({1: "abc", 2: "de"}, {"batch_size": 2, "live": True}, ["prompts with an answer"]),
    ],
)
def test_is_violated(updates, knobs, wrong):
    assert step(updates, **knobs) == wrong
