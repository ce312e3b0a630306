"""Reward of the package reasoning-gym: its task's own score of an answer; optional."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from verifier.data.problem_sources import ANSWER_TAG, LAST_NUMBER
from verifier.errors import UsageError
from verifier.rewards.answer import number_of, without_reasoning

try:
    from reasoning_gym import create_dataset
    from reasoning_gym.utils import extract_answer
except ImportError as _absent:
    raise UsageError("the package reasoning-gym is not installed: install ci/locks/environments.txt") from _absent


def reasoning_gym_reward(completion: str, row: Mapping[str, Any]) -> float:
    """Score of the task for the answer of a completion, by the option `extract` of the data.

    "answer_tag" is the text in the last `<answer>`, "last_number" the number that the reward `answer` reads; without
    either the task scores an empty text. By default it is the last `<answer>`, or all text outside of reasoning.

    Raises:
        UsageError: the row is of another source.

    Source:
        reasoning-gym 0.1.25, utils.py `extract_answer`, dataset.py `score_answer`.
    """
    about = row.get("reasoning_gym")
    if about is None:
        raise UsageError("the row is of no task of reasoning-gym: give data.source=reasoning-gym:TASK")
    data, entry = _problem(about["task"], json.dumps(about["options"]), about["seed"], about["index"])
    text, extract = without_reasoning(completion), about.get("extract")
    if extract == LAST_NUMBER:
        found = number_of(completion)
    else:
        otherwise = "" if extract == ANSWER_TAG else text.strip()
        tagged = extract_answer(text)
        found = otherwise if tagged is None else tagged
    return float(data.score_answer(found, entry=entry))


@lru_cache(maxsize=4096)
def _problem(task: str, options: str, seed: int, index: int) -> tuple[Any, dict[str, Any]]:
    """Generator of a problem, and the problem, made once more as the source of data made it."""
    data = _data(task, options, seed)
    return data, data[index]


@lru_cache(maxsize=16)
def _data(task: str, options: str, seed: int) -> Any:
    return create_dataset(task, **{"size": 500, **json.loads(options), "seed": seed})
