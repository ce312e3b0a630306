"""The processes of a run in which its reward and its environment run."""

from __future__ import annotations

from verifier.algorithms.registry import path_of_reward
from verifier.config.grpo import GrpoOptions
from verifier.data.examples import Example
from verifier.rewards.scorer import RewardPool
from verifier.trainer.episodes import row_of


def start_processes(options: GrpoOptions, processes: int | None = None) -> RewardPool:
    """Start the processes that a config asks for, or so many.

    Raises:
        UsageError: see `RewardPool`.
    """
    return RewardPool(
        path_of_reward(options.reward), options.environment, processes or options.reward_processes,
        options.reward_timeout_s, options.reward_errors,
    )  # fmt: skip


def try_environment(options: GrpoOptions, example: Example) -> None:
    """Refuse an environment that fails on a first turn of a row, which is its gold answer; none is not tried.

    Raises:
        UsageError: names the environment, the row and what was raised.
    """
    if not options.has_turns:
        return
    row = row_of(example)
    with RewardPool(path_of_reward(options.reward), options.environment, 1, options.reward_timeout_s) as pool:
        pool.step(pool.begin([row], [0]), [example.answer or ""], [example.id])
