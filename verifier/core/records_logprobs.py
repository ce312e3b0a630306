"""Records of log-probabilities and of sampled tokens: trainer, engine, oracle."""

from __future__ import annotations

from typing import Any

from verifier.core.record import ArrayRecord, Count, Digest, Lengths, Real, Record

Tokens = tuple[int, ...]


class LogprobRecord(ArrayRecord, frozen=True, kw_only=True):
    """Log-probabilities of tokens; the array [sum of lengths] is in nats, sequence after sequence."""

    lengths: Lengths


class TrainerLogprobs(LogprobRecord, frozen=True, kw_only=True, tag="logprob/trainer"):
    """Teacher-forced, by the trainer; float32."""

    temperature: float = 1.0
    """Divisor of the logits."""


class ReturnedLogprobs(Record, frozen=True, kw_only=True, tag="logprob/returned"):
    """Digest of the log-probabilities that one trainer rank got back."""

    digest: Digest


class OracleRecord(LogprobRecord, frozen=True, kw_only=True):
    """Log-probabilities by transformers in float32, log-softmax in float64."""

    whole: Lengths = ()
    """Tokens of each sequence, with those before the first scored one."""


class OracleLogprobs(OracleRecord, frozen=True, kw_only=True, tag="logprob/oracle"):
    """Teacher-forced, by the oracle."""


class OracleOfSampled(OracleRecord, frozen=True, kw_only=True, tag="logprob/sampled-oracle"):
    """Log-probabilities by the oracle of tokens that the engine sampled."""


class OracleOfShaped(OracleRecord, frozen=True, kw_only=True, tag="logprob/shaped-oracle"):
    """Oracle's log-probabilities of shaped requests; the nearest value where rounding decides what truncation keeps."""


class OracleOfNext(ArrayRecord, frozen=True, kw_only=True, tag="logprob/next"):
    """Distribution of the next token by the oracle; the array [vocabulary] float64 is in nats."""


class NoiseRecord(Record, frozen=True, kw_only=True):
    """Differences of log-probabilities of the same tokens between two arithmetics, nats."""

    greatest: Real
    mean: Real
    deviation: Real


class DtypeNoise(NoiseRecord, frozen=True, kw_only=True, tag="logprob/noise"):
    """Noise of transformers in the run's dtype against float32, or of float32 against float64."""


class EngineNoise(NoiseRecord, frozen=True, kw_only=True, tag="logprob/engine-noise"):
    """Noise of a quantizing engine at version 0 against transformers in float32."""


class StoredFloor(NoiseRecord, frozen=True, kw_only=True, tag="logprob/floor"):
    """Noise of a checkpoint in bf16 that was measured once and stored, for sequences of one range of lengths."""

    longest: Count
    """Tokens of the longest sequence that it speaks of."""
    tokens: Count
    """Log-probabilities that it was measured on."""
    median: Real
    p90: Real
    p99: Real
    stored: str
    """File that holds it."""


class EngineLogprobs(LogprobRecord, frozen=True, kw_only=True, tag="rollout/engine"):
    """Teacher-forced, by the engine; float32."""


class SampleRecord(LogprobRecord, frozen=True, kw_only=True):
    """Tokens that the engine sampled, one row a sample, and the log-probabilities that it reported with them."""

    prompts: tuple[Tokens, ...]
    tokens: tuple[Tokens, ...]
    cached: tuple[int, ...] = ()
    """Tokens of each prompt that the prefix cache held."""
    stops: tuple[Tokens, ...]
    """Tokens at which each was to stop."""
    limits: tuple[Count, ...]
    """Most tokens of each."""
    temperatures: tuple[float, ...]


class SampledTokens(SampleRecord, frozen=True, kw_only=True, tag="rollout/sampled"):
    """Sampled from the whole distribution."""


class ShapedTokens(SampleRecord, frozen=True, kw_only=True, tag="rollout/shaped"):
    """Sampled with penalties, biases, allowed tokens or truncation."""

    asked: tuple[dict[str, Any], ...]
    """Each request's `Sampling`."""


class DrawnTokens(ArrayRecord, frozen=True, kw_only=True, tag="rollout/drawn"):
    """Many samples of the one token after a prompt; the array [samples] float32 is what was reported, nats."""

    prompt: Tokens
    tokens: Tokens
    temperature: float


class RouteLogprobs(LogprobRecord, frozen=True, kw_only=True):
    """Teacher-forced, by a trainer with experts; float32."""

    rollouts: tuple[str, ...]
    """Id of each sequence."""


class NaturalRouteLogprobs(RouteLogprobs, frozen=True, kw_only=True, tag="replay/natural"):
    """Trainer's log-probabilities by routes that the routers chose by themselves."""


class ReplayedRouteLogprobs(RouteLogprobs, frozen=True, kw_only=True, tag="replay/scored"):
    """Trainer's log-probabilities by natural routes replayed, or by none after a replay."""


class ForcedRouteLogprobs(RouteLogprobs, frozen=True, kw_only=True, tag="replay/forced"):
    """Trainer's log-probabilities by routes that no router would choose."""


class OracleOfForced(OracleRecord, frozen=True, kw_only=True, tag="replay/oracle"):
    """Oracle's log-probabilities by those routes."""
