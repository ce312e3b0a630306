"""Records of the stage `rollout`: log-probabilities that the engine computes with what it holds."""

from __future__ import annotations

from typing import Any

from verifier.core.owed import Owed, anyone, at_last, if_drawn, per_sample, per_version
from verifier.core.record import ArrayRecord, Count, Lengths
from verifier.stages.replay.records import LogprobRecord


class EvaluatedAnswers(ArrayRecord, frozen=True, kw_only=True, tag="rollout/evaluated"):
    """A few answers of an evaluation, and the trainer's scores of them; lists have an entry an answer.

    Arrays over all tokens of all answers, prompts included: ``tokens`` int64; ``mask`` bool, sampled ones; float32
    nats, NaN elsewhere: ``engine`` as it reported them, ``trainer`` by the live weights of this version, and of greedy
    answers ``shortfall``, how far the logit of a token is below the greatest one in the trainer.
    """

    claimed: Count
    """Version that the metrics of the evaluation name."""
    temperature: float
    """Divisor of the logits of answers that are not greedy; of greedy ones it is 1."""
    ids: tuple[str, ...]
    lengths: Lengths
    greedy: tuple[bool, ...]
    max_answer_tokens: Count
    """Greatest length of an answer, or of a turn, that the config asks for."""
    end: Count
    """End token of the tokenizer."""
    other_ends: tuple[Count, ...] = ()
    """Other tokens at which engines stop too."""
    shaped: tuple[tuple[str, ...], tuple[str, ...]] | None = None
    """Knobs of the requests for all answers of the evaluation, those that are not greedy first, as `RequestSeeds` has
    them; None in older traces."""
    sent: Count | None = None
    """Version that the engine was sent last before the evaluation; None in older traces."""
    seeds: tuple[tuple[int, ...], ...] = ()
    """Seeds of all answers that are not greedy, problem by problem, in each turn, as `RequestSeeds` has them; empty in
    older traces."""
    weights: tuple[Count, ...] = ()
    """Versions of the weights that the engines' processes held when they sampled all answers of the evaluation, each
    once; empty of engines that get adapters, and in older traces."""


Tokens = tuple[int, ...]


class EngineLogprobs(LogprobRecord, frozen=True, kw_only=True, tag="rollout/engine"):
    """Teacher-forced, by the engine; float32."""

    owed = (Owed(anyone, per_version),)


class SampleRecord(LogprobRecord, frozen=True, kw_only=True):
    """Tokens that the engine sampled, one row a sample, and the log-probabilities that it reported with them."""

    prompts: tuple[Tokens, ...]
    tokens: tuple[Tokens, ...]
    cached: tuple[int, ...] = ()
    """Tokens of each prompt that the prefix cache held."""
    common: tuple[int, ...] = ()
    """Most that it can have held, see `Asked.common`; -1 if nobody looked."""
    stops: tuple[Tokens, ...]
    """Tokens at which each was to stop."""
    limits: tuple[Count, ...]
    """Most tokens of each."""
    ended: tuple[str, ...]
    """Why each ended, as reported: "stop" by a stop token, "length" by the limit."""
    temperatures: tuple[float, ...]
    seeds: tuple[int | None, ...] = ()
    """Seed of each request, None without one; empty where nobody keeps them."""


class SampledTokens(SampleRecord, frozen=True, kw_only=True, tag="rollout/sampled"):
    """Sampled from the whole distribution."""

    owed = (Owed(anyone, per_sample),)


class ShapedTokens(SampleRecord, frozen=True, kw_only=True, tag="rollout/shaped"):
    """Sampled with penalties, biases, allowed tokens or truncation."""

    owed = (Owed(anyone, at_last),)
    is_side = False

    asked: tuple[dict[str, Any], ...]
    """Each request's `Sampling`."""


class DrawnTokens(ArrayRecord, frozen=True, kw_only=True, tag="rollout/drawn"):
    """Many samples of the one token after a prompt; the array [samples] float32 is what was reported, nats."""

    owed = (Owed(anyone, if_drawn),)

    prompt: Tokens
    tokens: Tokens
    temperature: float
    bias: tuple[tuple[int, float], ...] = ()
    """Tokens that the request makes likely, and the nats added to the logit of each; each is counted apart."""
