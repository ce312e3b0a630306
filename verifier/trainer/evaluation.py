"""Answers of an evaluation, a few of which are kept with their tokens."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from verifier.core.seal import NO_SEAL, seal_of_array
from verifier.data.recorded import RolloutRow
from verifier.data.tokenizer import Tokenizer
from verifier.engine.api import Sample, Sampling
from verifier.model.checkpoint import Checkpoint, end_tokens
from verifier.trainer.episodes import PlayedTurns, Sampler, Turn

PROBLEMS = 8
"""Problems of an evaluation, at most, whose two answers are kept."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewarded:
    """Rewards of which a number of an evaluation is the mean, in the order of the held-out problems."""

    number: str
    """Name of the metric."""
    texts: Sequence[str]
    """Texts of the answers, as the reward read them."""
    rewards: Sequence[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """Answers of an evaluation to the problems of `places`."""

    version: int
    """Version of the weights that were evaluated, as the metrics have it."""
    sampled: Sequence[RolloutRow]
    greedy: Sequence[RolloutRow]
    rewards: Sequence[Rewarded]
    """Rewards of all answers, an entry for each number that the metrics have."""
    shaped: tuple[tuple[str, ...], tuple[str, ...]]
    """Knobs of the requests for all answers, sampled and greedy, as the engines' processes gave them."""
    seeds: Sequence[Sequence[int]]
    """Seeds of all answers that are not greedy, as the engines' processes named them; see `seeds_of`."""
    weights: Sequence[int]
    """Versions that the engines' processes held when they sampled all answers; see `weights_of`."""
    sent: int | None = None
    """Version that the engine was sent last; None for none."""
    turns: PlayedTurns | None = None
    """Turns of the answers that are kept; None where there is no environment."""


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


class Note(NamedTuple):
    """Notes of an answer."""

    seed: int
    tokens: int
    """Seal of its token ids."""
    nats: int
    """Seal of its log-probabilities."""
    shaped: str
    routes: int = NO_SEAL
    """Seal of its routes, which the engine's process took; none where none are replayed."""
    weights: tuple[tuple[int, int], ...] = ()
    cached: int = 0
    common: int = -1


Noted = tuple[Note, ...]
"""Notes of the answers to one request to the engine, prompt by prompt."""


def noted_of(answers: Sequence[Sequence[Sample]]) -> Noted:
    """Seeds that engines gave the answers to some prompts, and seals of the answers."""
    return tuple(
        Note(
            seed=sample.seed, tokens=seal_of_array(np.asarray(sample.tokens, np.int64)),
            nats=seal_of_array(np.asarray(sample.logprobs, np.float32)), shaped=sample.shaped,
            routes=sample.routes_seal, weights=sample.weights,
            cached=sample.cached_tokens, common=sample.common_tokens,
        )
        for own in answers
        for sample in own
    )  # fmt: skip


class NotedAnswers:
    """An engine whose answers are noted on their way; see `Sampler`.

    Attributes:
        noted: of the answers to each request so far.
    """

    def __init__(self, sampler: Sampler) -> None:
        self._sampler, self.noted = sampler, list[Noted]()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Sample]]:
        """See `Engine.generate`."""
        found = self._sampler.generate(prompts, sampling)
        self.noted.append(noted_of(found))
        return found


def ends_of(checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every token at which an engine may stop."""
    return tuple(sorted(end_tokens(checkpoint) | {tokenizer.eos_id}))
