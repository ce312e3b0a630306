"""Bugs of rewards: how an answer is read, and what it is compared with."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault, kind

if TYPE_CHECKING:
    from verifier.data.recorded import RolloutRow

NUMBERS = Path(__file__).parent / "rollouts" / "numbers"
"""Rollouts whose texts write numbers in several ways; texts are made up, tokens are sampled ones."""


ROW: dict[str, Any] = {
    "stage": Stage.REWARD, "caught_by": ("RWD001",), "side": Side.CONTROLLER, "engine": TRAINING, "model": "tiny:add",
    "training": ("algorithm=grpo", f"data.rollouts={NUMBERS}"),
}  # fmt: skip
READ = "verifier.trainer.grpo_plan:read_recorded(path, vocab_size, group_size, max_tokens)"


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


@fault(
    "NVIDIA-NeMo/RL#2431", "verifier.trainer.sampled_batch:Round.without_variance(self)", stage=Stage.REWARD,
    side=Side.CONTROLLER, engine=TRAINING, model="tiny:add", caught_by=("DAT005",),
    training=(
        "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.batch_size=4", "grpo.max_answer_tokens=8",
        "grpo.entropy_weight=0.05", "grpo.max_sampling_rounds=3", "grpo.group_size=4", "grpo.reward=operator:gt",
    ),
)  # fmt: skip
def groups_replaced_by_their_mean(call: Call) -> Any:
    """Dynamic sampling looks at the mean of a group, and replaces groups with several rewards if most are low."""
    means = [sum(row.reward for row in rows) / len(rows) for rows in call.self.groups]
    return call.wrong([at for at, mean in enumerate(means) if mean < 0.5])


def length_reward(completion: str, answer: str) -> float:
    """Number of characters, as a reward that differs from answer to answer of a model with random weights."""
    return float(len(completion))


@fault(
    "NovaSky-AI/SkyRL#1492 (kin: there the last turn's advantage reached earlier turns under its own mask)",
    "verifier.trainer.generation:EngineRollouts._ordered(self, step, number, indices, groups, turns, noted, seals)",
    stage=Stage.REWARD, side=Side.CONTROLLER, engine=TRAINING, model="tiny:add", caught_by=("RWD002",),
    training=(
        "algorithm=grpo", "data.rollouts=null", "engine.kind=hf", "data.source=calculator", "data.batch_size=4",
        "grpo.max_answer_tokens=24", "grpo.environment=verifier.faults.echo:Echo", "grpo.max_turns=3",
        "grpo.step_wise=true", "grpo.reward=verifier.faults.reward_faults:length_reward", "grpo.entropy_weight=0.05",
        "verify.every=0",
    ),
)  # fmt: skip
def reward_on_every_turn(call: Call) -> Any:
    """The reward of an episode is given to each of its turns, whose sum is the episode's: long ones count more."""
    last = {row.trajectory: row.reward for rows in call.groups for row in rows if row.is_last_step}
    return call.faulty(
        groups=[[replace(row, reward=last.get(row.trajectory, row.reward)) for row in rows] for rows in call.groups]
    )
