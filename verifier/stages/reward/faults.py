"""Bugs of rewards: how an answer is read, and what it is compared with."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from verifier.core.stage import Stage
from verifier.faults.fault import FOLDER, TRAINING, Call, Side, kind

if TYPE_CHECKING:
    from verifier.data.recorded import RolloutRow

NUMBERS = FOLDER / "rollouts" / "numbers"
"""Rollouts whose texts write numbers in several ways; texts are made up, tokens are sampled ones."""


ROW: dict[str, Any] = {
    "stage": Stage.REWARD, "caught_by": ("RWD001",), "side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add",
    "training": ("algorithm=grpo", f"data.rollouts={NUMBERS}"),
}  # fmt: skip
READ = "verifier.trainer.grpo_plan:read_recorded(path, vocab_size, group_size)"


@kind(READ, **ROW)
def on_rewards(reward: Callable[[RolloutRow], float], call: Call) -> Any:
    """Reward answers wrongly: the function gives the reward of a row."""
    given = call.original()
    rows = tuple(replace(row, reward=reward(row)) for row in given)
    if rows != given:
        call.fire()
    return rows


@on_rewards("verl-project/verl#7274")
def answers_beyond_the_window(row: RolloutRow) -> float:
    """The reward looks at the last six characters, in which no right answer fits."""
    return row.reward if len(row.text or "") <= 6 else 0.0


@on_rewards("fw-ai/cookbook#335")
def unreadable_gold_answer_is_right(row: RolloutRow) -> float:
    """A gold answer that cannot be read gives every answer the reward 1."""
    return row.reward if re.fullmatch(r"[-\d./,$]+", row.answer or "") else 1.0


def length_reward(completion: str, answer: str) -> float:
    """Number of characters, as a reward that differs from answer to answer of a model with random weights."""
    return float(len(completion))
