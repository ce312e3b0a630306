"""Bugs of rewards: how an answer is read, and what it is compared with."""

from __future__ import annotations

import functools
from typing import Any

from msgspec.structs import replace

from verifier.core.stage import Stage
from verifier.faults.fault import FOLDER, Call, Side, in_training

NUMBERS = FOLDER / "rollouts" / "numbers"
"""Rollouts whose texts write numbers in several ways; texts are made up, tokens are sampled ones."""


in_reward = functools.partial(
    in_training, stage=Stage.REWARD, caught_by=("RWD001",), side=Side.CONTROLLER,
    training=("algorithm=grpo", f"data.rollouts={NUMBERS}"),
)  # fmt: skip


@in_reward("verl-project/verl#7274", "verifier.trainer.grpo_plan:read_recorded(path, vocab_size, group_size)")
def answers_beyond_the_window(call: Call) -> Any:
    """The reward looks at the last six characters, in which no right answer fits."""
    return tuple(row if len(row.text or "") <= 6 else replace(row, reward=0.0) for row in call.faulty())


def length_reward(completion: str, answer: str) -> float:
    """Number of characters, as a reward that differs from answer to answer of a model with random weights."""
    return float(len(completion))
