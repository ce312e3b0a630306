"""Rollouts of a step as they were sampled: in one round, or in several that replace groups with one reward alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from verifier.data.recorded import RolloutRow, decoded, encoded
from verifier.trainer.asked_samples import Noted
from verifier.trainer.episodes import PlayedTurns


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
