"""Rollouts of a step as they were sampled: in one round, or in several that replace groups with one reward alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from verifier.core.record import Probe
from verifier.core.records_policy import EpisodeTurns, GivenRewards, RequestSeeds
from verifier.core.records_trainer import DataOrder
from verifier.data.recorded import RolloutRow, decoded, encoded
from verifier.rewards.answer import is_number
from verifier.trainer.asked_samples import Noted


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Rollouts of one round, group by group, with their rewards, and the prompts that they answer."""

    groups: Sequence[Sequence[RolloutRow]]
    order: DataOrder
    turns: EpisodeTurns | None = None
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

    def record(self, probe: Probe | None, step: int, reward: str) -> None:
        """Record prompts, answers and the rewards of replaced groups in the trace of the step.

        Args:
            probe: of the step; None records nothing.
            step: from 1.
            reward: name of the reward.
        """
        if probe is None:
            return
        for number, item in enumerate(self.rounds):
            probe.emit(item.order)
            if item.turns is not None:
                probe.emit(item.turns)
            probe.emit(
                RequestSeeds(
                    name=f"round {number}", version=step, round=number,
                    turns=tuple(tuple(note.seed for note in own) for own in item.noted),
                    seals=tuple(tuple((note.tokens, note.nats) for note in own) for own in item.noted),
                    routes=tuple(tuple(note.routes for note in own) for own in item.noted),
                    shaped=tuple(sorted({note.shaped for own in item.noted for note in own})),
                    weights=tuple(tuple(note.weights for note in own) for own in item.noted),
                    answers=tuple({row.trajectory or row.id: None for group in item.groups for row in group}),
                )
            )  # fmt: skip
            lost = item.without_variance() if number + 1 < self.limit else []
            if replaced := [row for at in lost for row in item.groups[at]]:
                probe.emit(rewards_of(f"replaced in round {number}", step, reward, replaced))


def mean_turns(rounds: Sequence[EpisodeTurns]) -> float:
    """Mean turns of an episode, over all rounds."""
    return sum(len(item.episodes) for item in rounds) / sum(len({*item.episodes}) for item in rounds)


def read_round(
    saved: Mapping[str, Any],
) -> tuple[list[list[RolloutRow]], EpisodeTurns | None, Sequence[Noted]]:
    """Groups, turns and notes of a round; inverse of `SampledBatch.saved`."""
    turns = None if saved["turns"] is None else msgspec.convert(saved["turns"], EpisodeTurns)
    noted = msgspec.convert(saved.get("noted", ()), tuple[Noted, ...])
    return [[decoded(row) for row in group] for group in saved["groups"]], turns, noted


def has_second_reader(reward: str, rows: Sequence[RolloutRow]) -> bool:
    """Tell whether RWD001 judges the reward of any of these rollouts, of a reward that has this name."""
    known = [(row.text, row.answer) for row in rows if row.text is not None and row.answer is not None]
    if reward:
        return reward == "answer" and bool(known)
    zero_or_one = all(row.reward in (0.0, 1.0) for row in rows)
    return zero_or_one and any("\\" not in text and is_number(answer) for text, answer in known)


def rewards_of(name: str, step: int, reward: str, rows: Sequence[RolloutRow]) -> GivenRewards:
    """Record of the rewards of rollouts, and what they were given for."""
    return GivenRewards(
        name=name, version=step, reward=reward, ids=tuple(row.id for row in rows),
        texts=tuple(row.text for row in rows), answers=tuple(row.answer for row in rows),
        rewards=tuple(row.reward for row in rows),
    )  # fmt: skip
