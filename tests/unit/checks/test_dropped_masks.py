"""DAT004 on tokens in the loss of updates: none of a rollout that is dropped, its own of every other.

What this does not exercise: real runs (tests/dist/test_train_drops.py), and bugs that DAT004 catches (tests/faults).
"""

from __future__ import annotations

import numpy as np
import pytest

from verifier.core.manifest import Manifest
from verifier.core.record import Record
from verifier.core.trace import Trace
from verifier.stages.advantage.records import Advantages, LossColumns, PolicyColumns
from verifier.stages.data.checks_turns import dropped_for_another_reason
from verifier.stages.data.records import Drops

IDS = ("cut", "whole")
OWN = [False, True, True, False, True, True]


def wrong(mask: list[bool], *, own: list[bool] | None = None, updates: int = 1, passes: int | None = None) -> list[str]:
    """What is wrong with a step of two rollouts of two tokens in the loss, of which the first is dropped as cut off."""
    policy = {"version": np.full(6, 0), "mask": np.array(mask)} | ({} if own is None else {"own": np.array(own)})
    records: list[Record] = [
        Drops(
            name="batch", version=1, ids=IDS, truncated=(True, False), reasons=("overlong", ""), drop_overlong=True,
            drop_zero_variance=False,
        ),
        Advantages(
            name="advantages", version=1, estimator="grpo", ids=IDS, groups=("g",) * 2, trajectories=IDS,
            rewards=(0.0, 1.0), penalties=(0.0,) * 2, token_counts=(2,) * 2, advantages=(0.0,) * 2,
        ),
        PolicyColumns(
            name="policy inputs", version=1, ids=IDS, lengths=(3, 3), ratio_over="old", weight_level="",
            weight_cap=2.0, max_staleness=0, trained_version=0, array="0",
        ),
        *(
            LossColumns(
                name=f"update {number}", version=1, aggregation="token_mean", ids=IDS, groups=("g",) * 2,
                lengths=(3, 3), array="1",
            )
            for number in range(1, updates + 1)
        ),
    ]  # fmt: skip

    def read(array: str) -> dict[str, np.ndarray]:
        return policy if array == "0" else {"mask": np.array(mask), "weight": np.ones(6)}

    manifest = Manifest() if passes is None else Manifest(config={"grpo": {"epochs": passes}})
    return [item.what for item in dropped_for_another_reason(Trace(manifest, records, read)) if not item.same]


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        ([False] * 3 + OWN[3:], []),
        (OWN[:3] + [False] * 3, ["cut in update 1", "whole in update 1"]),
        (OWN, ["cut in update 1"]),
        ([False] * 4 + [True, False], ["whole in update 1"]),
        ([False] * 3 + [True, True, False], ["whole in update 1"]),
    ],
)
def test_dropped_rollouts_have_no_token_in_the_loss_and_others_their_own(mask: list[bool], found: list[str]) -> None:
    assert wrong(mask, own=OWN) == found


def test_every_pass_over_a_mini_batch_is_compared() -> None:
    assert wrong(OWN, own=OWN, updates=2) == ["cut in update 1", "cut in update 2"]


def test_a_step_without_updates_or_without_own_masks_has_nothing_to_compare() -> None:
    assert wrong(OWN, own=OWN, updates=0) == []
    assert wrong(OWN) == []


@pytest.mark.parametrize(("updates", "passes", "found"), [(1, 1, []), (2, 2, []), (2, 1, ["whole in all updates"])])
def test_a_step_trains_each_rollout_once_in_each_pass(updates: int, passes: int, found: list[str]) -> None:
    kept = [False] * 3 + OWN[3:]
    assert wrong(kept, own=OWN, updates=updates, passes=passes) == found
    assert wrong(kept, own=OWN, updates=updates) == []
