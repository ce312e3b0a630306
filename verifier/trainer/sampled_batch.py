"""Rollouts of a step as they were sampled: in one round, or in several that replace groups with one reward alone."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from verifier.config import TrainConfig
from verifier.core.stage import Stage
from verifier.data.recorded import RolloutRow, decoded, encoded
from verifier.data.rollout import Rollout
from verifier.engine.api import Sample
from verifier.launch.failures import StackFailed, distribution
from verifier.trainer.episodes import PlayedTurns
from verifier.trainer.evaluation import Noted


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Rollouts of one round, group by group, with their rewards, and the prompts that they answer."""

    groups: Sequence[Sequence[RolloutRow]]
    indices: Sequence[int]
    """Places of the prompts in the data set."""
    turns: PlayedTurns | None = None
    """Turns of its episodes; None where there is no environment."""
    noted: Sequence[Noted] = ()
    """Seed and seals of each answer, request by request, a turn each."""
    failures: int = 0
    """Rewards of 0 of episodes whose reward or environment failed."""
    seals: Sequence[int] = ()
    """Seals of the rewards, see `RewardPool`; none where a checkpoint had them."""

    def without_variance(self) -> list[int]:
        """Numbers of the groups whose rewards are all equal."""
        return [at for at, rows in enumerate(self.groups) if len({row.reward for row in rows}) == 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledBatch:
    """All rounds of a step; each replaces the groups without variance of the one before it."""

    rounds: Sequence[Round]
    limit: int
    """Rounds that the config allows."""

    @property
    def rows(self) -> Sequence[RolloutRow]:
        """Rollouts of the step, in the order of the prompts that were replaced or not."""
        groups = list(self.rounds[0].groups)
        places = list(range(len(groups)))
        for before, after in zip(self.rounds, self.rounds[1:], strict=False):
            places = [places[at] for at in before.without_variance()]
            for place, rows in zip(places, after.groups, strict=True):
                groups[place] = rows
        return [row for rows in groups for row in rows]

    @property
    def facts(self) -> Mapping[str, float]:
        """Metrics of episodes and of dynamic sampling; none where there is none."""
        turns = [item.turns for item in self.rounds if item.turns is not None]
        found: dict[str, float] = {}
        if turns:
            found["turns"] = mean_turns(turns)
        if failures := sum(item.failures for item in self.rounds):
            found["reward_errors"] = float(failures)
        if self.limit == 1:
            return found
        replaced = sum(len(item.groups) for item in self.rounds[1:])
        return found | {"sampling_rounds": float(len(self.rounds)), "replaced_groups": float(replaced)}

    def saved(self) -> list[Any]:
        """Rows by group, turns and notes of each round, as a checkpoint keeps them; see `read_round`."""
        return [
            {"groups": [[encoded(row) for row in group] for group in item.groups],
             "turns": None if item.turns is None else msgspec.to_builtins(item.turns),
             "noted": [[[*each] for each in own] for own in item.noted]}
            for item in self.rounds
        ]  # fmt: skip


def mean_turns(rounds: Sequence[PlayedTurns]) -> float:
    """Mean turns of an episode, over all rounds."""
    return sum(len(item.episodes) for item in rounds) / sum(len({*item.episodes}) for item in rounds)


def read_round(
    saved: Mapping[str, Any],
) -> tuple[list[list[RolloutRow]], PlayedTurns | None, Sequence[Noted]]:
    """Groups, turns and notes of a round; inverse of `SampledBatch.saved`."""
    turns = None if saved["turns"] is None else msgspec.convert(saved["turns"], PlayedTurns)
    noted = msgspec.convert(saved.get("noted", ()), tuple[Noted, ...])
    return [[decoded(row) for row in group] for group in saved["groups"]], turns, noted


def exact_tokens(config: TrainConfig, rollout: Rollout) -> np.ndarray:
    """[L] bool, sampled tokens that read no keys and values of other weights than their own.

    Where requests keep keys and values at an update, the later tokens read those of the weights that came first.
    """
    if not config.grpo.keep_kv_cache or not rollout.sampled.any():
        return rollout.sampled
    return rollout.sampled & (rollout.versions == rollout.versions[rollout.sampled][0])


def fresh_tokens(config: TrainConfig, rollout: Rollout, version: int) -> np.ndarray:
    """[L] bool, tokens that a version sampled, and no other had a part in."""
    return exact_tokens(config, rollout) & (rollout.versions == version)


def has_fresh(config: TrainConfig, rollouts: Iterable[Rollout], version: int) -> bool:
    """Tell whether a token in the loss is of a version: trainer and engine then score it by the same weights."""
    return any(bool((fresh_tokens(config, item, version) & item.mask).any()) for item in rollouts)


def versions_of(sample: Sample, held: Sequence[int]) -> tuple[int, ...]:
    """Version of the weights that sampled each token, of those that its engine held, in order."""
    return tuple(held[count] for count in sample.updates or (0,) * len(sample.tokens))


class LogprobLost(StackFailed):
    """The engine sampled a token, and its log-probability is NaN or infinite.

    Attributes:
        step: whose trace has the rollouts; 0 for an evaluation.
    """

    step: int = 0


def require_numbers(config: TrainConfig, rows: Iterable[RolloutRow], step: int = 0) -> None:
    """Refuse rollouts of an engine with a sampled token whose log-probability is not finite.

    Raises:
        LogprobLost: names the engine, its version, the rollout, the token and the version of its weights.
    """
    for row in rows:
        for at, (drawn, nats) in enumerate(zip(row.sampled, row.logprobs, strict=True)):
            if drawn and not math.isfinite(nats):
                package, version = distribution({"hf": "transformers"}.get(config.engine.kind, config.engine.kind))
                lost = LogprobLost.of(
                    name="the engine", package=package, package_version=version, at=Stage.ROLLOUT.label,
                    during=row.versions[at],
                    message=f"the engine's log-probability of answer token {at} of `{row.id}`, which version "
                    f"{row.versions[at]} sampled, is {nats}",
                )  # fmt: skip
                lost.step = step
                raise lost
