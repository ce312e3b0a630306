"""Ends of live answers by DAT008, on hand-written rollouts: one turn and several, other end tokens, whole answers.

What this does not exercise: real runs (tests/dist/train_clean_case.py), and bugs that DAT008 catches (tests/faults).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from verifier.core.manifest import Manifest
from verifier.core.record import Record
from verifier.core.trace import Trace
from verifier.stages.advantage.records import PolicyColumns
from verifier.stages.data.checks_handed_on import answer_ends_elsewhere
from verifier.stages.data.records import Drops, SamplingAsked
from verifier.stages.pack.records import Rollouts

END, OTHER = 3, 4


def wrong(
    tokens: list[int], sampled: str, *, truncated: bool, mask: str | None = None, reason: str = "", **asked: Any
) -> list[str]:
    """What is wrong with one rollout; in `sampled` and `mask` an x stands for each token that is."""
    drawn = np.array([mark == "x" for mark in sampled])
    in_loss = drawn if mask is None else np.array([mark == "x" for mark in mask])
    sizes: Any = {
        "seed": 0, "batch_size": 1, "group_size": 1, "max_rounds": 1, "max_turns": 1, "temperature": 1.0,
        "max_answer_tokens": 3, "end": END, "other_ends": (OTHER,), **asked,
    }  # fmt: skip
    records: list[Record] = [
        SamplingAsked(name="answers", version=1, **sizes),
        PolicyColumns(
            name="policy inputs", version=1, ids=("a",), lengths=(len(tokens),), ratio_over="old", weight_level="",
            weight_cap=2.0, max_staleness=0, trained_version=0, array="0",
        ),
        Drops(
            name="batch", version=1, ids=("a",), truncated=(truncated,), reasons=(reason,), drop_overlong=False,
            drop_zero_variance=False,
        ),
        Rollouts(
            name="trained", version=1, ids=("a",), groups=("g",), lengths=(len(tokens),), prompt_lengths=(1,),
            rewards=(0.0,), array="0",
        ),
    ]  # fmt: skip
    arrays = {"tokens": np.array(tokens), "sampled": drawn, "mask": in_loss, "version": np.where(drawn, 0, -1)}
    trace = Trace(Manifest(), records, lambda record: arrays)
    return [item.what.removesuffix(" of a") for item in answer_ends_elsewhere(trace) if not item.same]


@pytest.mark.parametrize(
    ("tokens", "sampled", "knobs"),
    [
        ([9, 7, END], "-xx", {"truncated": False}),
        ([9, 7, 7, END], "-xxx", {"truncated": False}),  # ended at the last place allowed
        ([9, 7, 7, 7], "-xxx", {"truncated": True}),
        ([9, 7, OTHER], "-xx", {"truncated": True}),
        ([9, END, 7, 7], "-xxx", {"truncated": True, "ends": False}),
        ([9, 7, END, 8, 7, END], "-xx-xx", {"truncated": False}),  # two turns
        ([9, 7, END, 8, 7, 7, 7], "-xx-xxx", {"truncated": True}),
        ([9, 7, END], "-xx", {"truncated": False, "mask": "---", "reason": "stale"}),
    ],
)
def test_holds(tokens, sampled, knobs):
    assert not wrong(tokens, sampled, **knobs)


@pytest.mark.parametrize(
    ("tokens", "sampled", "knobs", "found"),
    [
        ([9, 7, END], "-xx", {"truncated": False, "mask": "-x-"}, ["a"]),
        ([9, 7, 7, END], "-xxx", {"truncated": True}, ["flag"]),
        ([9, 7, 7, 7], "-xxx", {"truncated": False}, ["flag"]),
        ([9, 7, 7], "-xx", {"truncated": True}, ["end"]),
        ([9, 7, END, 7], "-xxx", {"truncated": True}, ["end"]),
        ([9, 7, 7, 7, END], "-xxxx", {"truncated": False}, ["end"]),
        ([9, 7, 8, 7, END], "-x-xx", {"truncated": False}, ["end"]),  # a turn that nothing ended
        ([9, 7, END], "-xx", {"truncated": False, "ends": False}, ["end"]),
    ],
)
def test_is_violated(tokens, sampled, knobs, found):
    assert wrong(tokens, sampled, **knobs) == found
