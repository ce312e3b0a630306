"""Orders of a run to its engine, as a step's trace has them, and what is noted of the engine's answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from verifier.config import TrainConfig
from verifier.core.records_policy import SamplingAsked
from verifier.core.seal import NO_SEAL, seal_of_array
from verifier.data.tokenizer import Tokenizer
from verifier.engine.api import Sample, Sampling
from verifier.model.checkpoint import Checkpoint
from verifier.model.end_tokens import end_tokens
from verifier.model.families import size_if_any
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


def sampling_asked(
    config: TrainConfig, checkpoint: Checkpoint, tokenizer: Tokenizer, step: int, *, whole_answers: bool
) -> SamplingAsked:  # fmt: skip
    """Record of what the config asks of a step's answers."""
    options, ends = config.grpo, ends_of(checkpoint, tokenizer)
    return SamplingAsked(
        name="answers", version=step, seed=config.seed, batch_size=config.data.batch_size,
        group_size=options.group_size, max_rounds=options.max_sampling_rounds, max_turns=options.max_turns,
        temperature=options.temperature, max_answer_tokens=options.max_answer_tokens, end=tokenizer.eos_id,
        other_ends=tuple(item for item in ends if item != tokenizer.eos_id), ends=not whole_answers,
        vocab_size=size_if_any(checkpoint.config, "vocab_size") or 0, quantized=bool(config.engine.quantization),
        filtered=options.drop_overlong or options.drop_zero_variance or options.max_sampling_rounds > 1,
    )  # fmt: skip


def ends_of(checkpoint: Checkpoint, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Every token at which an engine may stop."""
    return tuple(sorted(end_tokens(checkpoint) | {tokenizer.eos_id}))
