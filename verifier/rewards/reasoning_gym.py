"""Reward of the package reasoning-gym: its task's own score of an answer; optional."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from verifier.errors import UsageError
from verifier.rewards.answer import without_reasoning

try:
    from reasoning_gym import create_dataset
    from reasoning_gym.utils import extract_answer
except ImportError as _absent:
    raise UsageError("the package reasoning-gym is not installed: install ci/locks/environments.txt") from _absent


def reasoning_gym_reward(completion: str, row: Mapping[str, Any]) -> float:
    """Score of the task for the text in the last `<answer>` of a completion, or for all of it outside of reasoning.

    Raises:
        UsageError: the row is of another source.

    Source:
        reasoning-gym 0.1.25, utils.py `extract_answer`, dataset.py `score_answer`.
    """
    about = row.get("reasoning_gym")
    if about is None:
        raise UsageError("the row is of no task of reasoning-gym: give data.source=reasoning-gym:TASK")
    data, entry = _problem(about["task"], json.dumps(about["options"]), about["seed"], about["index"])
    text = without_reasoning(completion)
    found = extract_answer(text)
    return float(data.score_answer(text.strip() if found is None else found, entry=entry))


@lru_cache(maxsize=4096)
def _problem(task: str, options: str, seed: int, index: int) -> tuple[Any, dict[str, Any]]:
    """Generator of a problem, and the problem, made once more as the source of data made it."""
    data = _data(task, options, seed)
    return data, data[index]


@lru_cache(maxsize=16)
def _data(task: str, options: str, seed: int) -> Any:
    return create_dataset(task, **{"size": 500, **json.loads(options), "seed": seed})
