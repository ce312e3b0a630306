"""Numbers of an evaluation: each held-out problem is asked once and counts once, whatever became of it.

What this does not exercise: engines, and the ranks' logits (tests/dist/test_train_clean.py).
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.data.rollout import make_rollout
from verifier.engine.api import Sample
from verifier.model.checkpoint import open_checkpoint
from verifier.model.tiny import write_tiny
from verifier.trainer import update_facts_megatron
from verifier.trainer.generation import EngineRollouts

PROBLEMS = 11
"""No multiple of a batch."""


class Engine:
    """Answers each prompt by its last token and the end token."""

    def __init__(self, end: int) -> None:
        self.end, self.prompts, self.sampled = end, list[Any](), list[Any]()

    def generate(self, prompts: Any, sampling: Any) -> list[list[Sample]]:
        self.prompts.append(list(prompts))
        self.sampled.append(sampling)
        tokens = [(prompt[-1], self.end) for prompt in prompts]
        return [[Sample(tokens=own, logprobs=(-1.0, -1.0), seed=1)] * sampling.n for own in tokens]


class Reward:
    """Rewards the first three answers of eight, and is asked by `RewardPool.score`'s arguments."""

    function, seals = "tests:reward", ()

    def __init__(self) -> None:
        self.asked = list[Any]()

    def score(self, episodes: Any) -> list[float]:
        self.asked.append([item.id for item in episodes])
        return [float(at % 8 < 3) for at in range(len(episodes))]

    def take_failures(self) -> int:
        return 0


def evaluated(folder: Path) -> tuple[dict[str, float], EngineRollouts]:
    words = ("model=tiny:add", f"run={folder}", "algorithm=grpo", f"evaluation.num_problems={PROBLEMS}",
             "data.batch_size=4", "grpo.temperature=0.8")  # fmt: skip
    rollouts = EngineRollouts(load(TrainConfig, overrides=words)[0], open_checkpoint(write_tiny("add", folder)))
    rollouts._client, rollouts._reward = Engine(rollouts._tokenizer.eos_id), Reward()  # type: ignore[assignment]
    return rollouts.evaluate(7), rollouts


def test_every_held_out_problem_is_asked_and_counts_once(tmp_path):
    found, rollouts = evaluated(tmp_path)
    assert found == {"held_out_version": 7.0, "held_out_reward": 6 / PROBLEMS, "accuracy": 6 / PROBLEMS}
    assert [len(asked) for asked in rollouts._client.prompts] == [PROBLEMS, PROBLEMS]  # type: ignore[union-attr]
    assert [len({*asked}) for asked in rollouts._reward.asked] == [PROBLEMS, PROBLEMS]  # type: ignore[union-attr]


def greedy() -> list[bool]:
    """What is found of fifteen problems, of which each fifth has a wrong token before its end, each seventh at it."""
    rollouts = [make_rollout(f"{at}", np.array([1, 2]), np.array([3, 4])) for at in range(15)]
    right = [torch.tensor([False, at % 5 != 0, at % 7 != 0]) for at in range(15)]
    score = update_facts_megatron.step_megatron.score
    update_facts_megatron.step_megatron.score = lambda trainer, given, **_: right[: len(given)]
    try:
        return update_facts_megatron.greedy_answers(SimpleNamespace(), rollouts)  # type: ignore[arg-type]
    finally:
        update_facts_megatron.step_megatron.score = score


def test_a_problem_is_solved_where_all_tokens_of_its_response_are_the_likeliest():
    assert greedy() == [bool(at % 5 and at % 7) for at in range(15)]
