"""Answers of an evaluation, a few of which stand beside the trainer's scores of them in the trace that comes next."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from verifier.config.grpo import GrpoOptions
from verifier.core.record import Probe
from verifier.core.records_policy import EpisodeTurns, EvaluatedAnswers, GivenRewards, RewardSeals
from verifier.data.examples import Example
from verifier.data.recorded import RolloutRow, rollout_of
from verifier.data.rollout import Rollout
from verifier.data.rollout_file import load_rollouts, save_rollouts
from verifier.trainer.batches import HeldOut, Score
from verifier.trainer.decoded_rollouts import record_tokens
from verifier.trainer.episodes import Turn

PROBLEMS = 8
"""Problems of an evaluation, at most, whose two answers are scored by the trainer, in two passes, or in three
at another temperature than 1."""


Ends = Sequence[int]
"""Tokens that end an answer, the tokenizer's end token first."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Answers of an evaluation to the problems of `places`."""

    version: int
    """Version of the weights that were evaluated, as the metrics have it."""
    sampled: Sequence[RolloutRow]
    greedy: Sequence[RolloutRow]
    rewards: Sequence[GivenRewards]
    """Rewards of all answers, and what they were given for: a record for each number that the metrics have."""
    seals: Sequence[RewardSeals]
    """Seals of these rewards, as the process that gave them named them."""
    shaped: tuple[tuple[str, ...], tuple[str, ...]]
    """Knobs of the requests for all answers, sampled and greedy, as the engines' processes gave them."""
    seeds: Sequence[Sequence[int]]
    """Seeds of all answers that are not greedy, as the engines' processes named them; see `seeds_of`."""
    weights: Sequence[int]
    """Versions that the engines' processes held when they sampled all answers; see `weights_of`."""
    sent: int | None = None
    """Version that the engine was sent last; None for none."""
    turns: EpisodeTurns | None = None
    """Turns of the answers that are kept; None where there is no environment."""


def rewards_of_answers(
    number: str, version: int, reward: str, examples: Sequence[Example], texts: Sequence[str], rewards: Sequence[float]
) -> GivenRewards:
    """Record of the rewards of which a number of an evaluation is the mean.

    Args:
        number: name of the metric.
        version: of the weights.
        reward: name of the function.
        examples: held-out problems.
        texts: of their answers, as the reward read them.
        rewards: that it gave.
    """
    return GivenRewards(
        name=f"held-out {number}", version=version, reward=reward,
        ids=tuple(f"{number} {version}/{at}/0/{example.id}" for at, example in enumerate(examples)), texts=tuple(texts),
        answers=tuple(example.answer for example in examples), rewards=tuple(rewards),
    )  # fmt: skip


def record_held_out(probe: Probe, version: int, held_out: HeldOut, file: Path) -> None:
    """Record the tokens of a few problems of fine-tuning.

    Args:
        probe: recorder of a trace.
        version: of the weights that were evaluated.
        held_out: the problems.
        file: of the problems with their responses.
    """
    rollouts, _ = load_rollouts(file)
    few = places(version, len(rollouts))
    record_tokens(
        probe, version, held_out.tokenizer, held_out.files, [rollouts[at] for at in few],
        lambda at: held_out.examples[few[at]], whole=True,
    )  # fmt: skip


def places(version: int, count: int) -> list[int]:
    """Places of the problems whose answers are kept: one of each equal part, others at each evaluation.

    The place within a part is drawn by version, and one further in each part: a step of one size would keep to every
    other problem, which one of two engines answers, and to the same ones where evaluations are as many versions apart.
    """
    kept = min(PROBLEMS, count)
    edges = [at * count // kept for at in range(kept + 1)]
    drawn = int.from_bytes(hashlib.blake2b(f"{version}".encode(), digest_size=8).digest())
    return [begin + (drawn + at) % (end - begin) for at, (begin, end) in enumerate(pairwise(edges))]


def seeds_of(episodes: Sequence[Sequence[Turn]]) -> list[list[int]]:
    """Seed of each turn, by its number: of those that have it, in the order of the episodes."""
    most = max(map(len, episodes))
    return [[own[number].sample.seed for own in episodes if number < len(own)] for number in range(most)]


def weights_of(episodes: Sequence[Sequence[Turn]]) -> set[int]:
    """Versions of the weights that sampled some episodes, as the processes of the engines named them."""
    return {version for own in episodes for turn in own for version, _ in turn.sample.weights}


def record_answers(
    probe: Probe, answered: Answered, version: int, options: GrpoOptions, ends: Ends, score: Score, file: Path
) -> None:  # fmt: skip
    """Score answers by the live weights, and record both sides.

    Args:
        probe: recorder of a trace.
        answered: of the last evaluation.
        version: of the live weights.
        options: of the run: the temperature of the answers that are not greedy, and the greatest length.
        ends: tokens that end an answer.
        score: by the ranks.
        file: for a batch of each kind, which is removed again.
    """
    temperature, (end, *other_ends) = options.temperature, ends
    sampled, greedy = ([rollout_of(row) for row in rows] for rows in (answered.sampled, answered.greedy))

    def scored(rollouts: Sequence[Rollout], which: str) -> list[np.ndarray]:
        save_rollouts(file, rollouts)
        found = score(file, which)
        file.unlink()
        return found

    rows = [*answered.sampled, *answered.greedy]
    passes = [(sampled, "current"), (greedy, "greedy")] if temperature != 1 else [([*sampled, *greedy], "current")]
    arrays = {
        "tokens": [item.tokens for item in (*sampled, *greedy)],
        "mask": [item.mask for item in (*sampled, *greedy)],
        "engine": [item.logprobs for item in (*sampled, *greedy)],
        "trainer": [values for part, which in passes for values in scored(part, which)],
        "shortfall": [*(np.full(len(item), np.nan) for item in sampled), *scored(greedy, "shortfall")],
    }  # fmt: skip
    record = EvaluatedAnswers(
        name="held-out problems", version=version, claimed=answered.version, temperature=temperature,
        ids=tuple(row.id for row in rows), lengths=tuple(len(row.tokens) for row in rows),
        greedy=(False,) * len(answered.sampled) + (True,) * len(answered.greedy),
        max_answer_tokens=options.max_answer_tokens, end=end, other_ends=tuple(other_ends), shaped=answered.shaped,
        seeds=tuple(map(tuple, answered.seeds)), sent=answered.sent, weights=tuple(answered.weights),
    )  # fmt: skip
    kinds = {"mask": np.dtype(bool), "tokens": np.dtype(np.int64)}
    probe.emit(record, {name: np.concatenate(own, dtype=kinds.get(name, np.float32)) for name, own in arrays.items()})
    turns = () if answered.turns is None else (answered.turns,)
    for item in (*answered.rewards, *answered.seals, *turns):
        probe.emit(item)


Examine = Callable[[Probe | None, int], bool]
"""Records answers of the last evaluation beside the scores of a version; tells whether there were any."""
