"""Notes of an engine's answers as they arrive, and the tokens that end one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from verifier.core.seal import NO_SEAL, seal_of_array
from verifier.data.tokenizer import Tokenizer
from verifier.engine.api import Sample, Sampling
from verifier.model.checkpoint import Checkpoint
from verifier.model.end_tokens import end_tokens
from verifier.trainer.episodes import Sampler


class Note(NamedTuple):
    """Notes of an answer."""

    seed: int
    tokens: int
    """Seal of its token ids."""
    nats: int
    """Seal of its log-probabilities."""
    shaped: str
    """See `Sample.shaped`."""
    routes: int = NO_SEAL
    """Seal of its routes, which the engine's process took; none where none are replayed."""
    weights: tuple[tuple[int, int], ...] = ()
    """See `Sample.weights`."""


Noted = tuple[Note, ...]
"""Notes of the answers to one request to the engine, prompt by prompt."""


def noted_of(answers: Sequence[Sequence[Sample]]) -> Noted:
    """Seeds that engines gave the answers to some prompts, and seals of the answers."""
    return tuple(
        Note(
            seed=sample.seed, tokens=seal_of_array(np.asarray(sample.tokens, np.int64)),
            nats=seal_of_array(np.asarray(sample.logprobs, np.float32)), shaped=sample.shaped,
            routes=sample.routes_seal, weights=sample.weights,
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
