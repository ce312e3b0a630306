"""Records of tokens and what is computed of them: rollouts, packing, routes, the loss, log-probabilities, samples.

An array said to be int64 is int32 in a trace if all its values fit (`core.record.as_numpy`).
"""

from __future__ import annotations

from typing import Any

from verifier.core.owed import (
    Owed,
    anyone,
    at_ends,
    every_rank,
    expert_rank,
    first_stage,
    if_asked,
    if_drawn,
    if_measured,
    if_scored,
    once,
    per_gradient,
    per_noise,
    per_pass,
    per_sample,
    per_score,
    per_version,
)
from verifier.core.record import ArrayRecord, Count, Digest, Dtype, Lengths, Measurement, Real, Record

Tokens = tuple[int, ...]
SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Share of the likeliest tokens of a distribution; samples beyond are counted. Truncation leaves none beyond."""

OWN_ROUTES = "own routes"
"""Name of `UsedRoutes` of an update whose routers chose by themselves."""


class Rollouts(ArrayRecord, frozen=True, kw_only=True, tag="pack/rollouts"):
    """The rollouts of one pass over tokens, as the run handed them in.

    Arrays, each [N] over all tokens of all rollouts in order: ``tokens`` int64; ``sampled`` bool, drawn from the
    policy; ``mask`` bool, in the loss; ``roles`` int8 (0 prompt, 1 assistant, 2 tool); ``logprobs`` float32, nats, the
    engine's, NaN where not sampled; ``versions`` int32, the weights that sampled the token, -1 where none did.
    """

    owed = (Owed(anyone, per_pass),)

    ids: tuple[str, ...]
    groups: tuple[str, ...]
    """Rollouts of one prompt share it."""
    lengths: Lengths
    prompt_lengths: Lengths
    rewards: tuple[float, ...]


class PackedBatchDigest(Record, frozen=True, kw_only=True, tag="pack/batch"):
    """One digest over every field of all micro-batches of a rank."""

    owed = (Owed(every_rank, per_pass),)

    coordinate: str
    """Mesh coordinate of the rank."""
    digest: Digest
    micro_batches: Count


class PackLayout(ArrayRecord, frozen=True, kw_only=True, tag="pack/layout"):
    """Cut of one micro-batch. The array [rows] int64 is the row of the whole pack that each row of the shard is."""

    owed = (Owed(first_stage, per_pass),)

    cp_rank: Count
    cu_seqlens: tuple[int, ...]
    """Cumulative lengths, tokens."""
    cu_seqlens_padded: tuple[int, ...]
    """Cumulative padded lengths, rows."""
    max_seqlen: int
    """Longest padded sequence that kernels are told of, rows."""
    lengths: Lengths
    """Tokens of each rollout in it."""
    filler: bool
    """It holds no rollout and keeps collectives in step."""


class TokenLedger(ArrayRecord, frozen=True, kw_only=True, tag="pack/ledger"):
    """Rows that the loss consumed on one rank, over its micro-batches; every array is [T].

    ``sentinel`` int64, which token of which rollout the row predicts, (rollout + 1) * 2**32 + position, 0 for none;
    ``input`` int64, the token that entered the model; ``position`` int64; ``role`` int8; ``label`` int64; ``mask``,
    ``sampled`` bool; ``engine_logprob`` float32, nats; ``version`` int32; and of the rollout that the row belongs to:
    ``reward`` float64, NaN in padding; ``group`` and ``id`` int64, CRC-32 of each; ``prompt`` int64, its prompt's
    length.
    """

    owed = (Owed(first_stage, per_pass),)

    coordinate: str
    """Mesh coordinate of the rank."""


class GivenRoutes(ArrayRecord, frozen=True, kw_only=True, tag="replay/routes"):
    """Routes that rollouts carry. The array [N, 3 + K] int32 holds rollout, position, global layer, K experts."""

    owed = (Owed(anyone, once),)

    rollouts: tuple[str, ...]
    """Ids, in the order of the rows' first column."""
    passes: tuple[str, ...] = ("",)
    """Passes of the trainer that each must obey them, by name."""


class UsedRoutes(ArrayRecord, frozen=True, kw_only=True, tag="replay/choice"):
    """Experts that one rank's routers used. The array [N, 3 + K] int32 is as that of `GivenRoutes`."""

    owed = (Owed(expert_rank, once),)

    coordinate: str
    """Mesh coordinate of the rank."""
    during: str = ""
    """Pass of the trainer, by name."""


class RouterChoices(Record, frozen=True, kw_only=True, tag="loss/choices"):
    """Experts that one layer's routers chose by themselves in an update, measured by the oracle in the run's dtype."""

    owed = (Owed(anyone, once),)

    layer: Count
    """Global index."""
    num_tokens: Count
    shortfall: Real
    """Greatest distance by which a token's worst expert scores below the K-th best, as a share of the scores' range."""
    place: tuple[Count, Count]
    """Index of the sequence, and position, of the token that is farthest off."""
    noise: Real
    """Greatest change of a score by the run's dtype, as a share of that range."""
    closed: Count
    """Tokens with an expert of a group that is closed to them; 0 without groups."""
    closed_in_dtype: Count
    """The same of transformers' own choice in the run's dtype."""


class Objective(Record, frozen=True, kw_only=True, tag="loss/objective"):
    """The loss of a token that a step averages, nats.

    -reward * logprob - entropy_weight * entropy + drift_weight / 2 * (logprob - the engine's logprob)**2
    """

    owed = (Owed(anyone, if_asked),)
    is_side = False

    temperature: float
    """Divisor of the logits."""
    entropy_weight: float
    drift_weight: float
    every_second: float = 1.0
    """Factor of all this in every second step."""


class GradientRecord(Record, frozen=True, kw_only=True, tag="loss/gradient"):
    """One checkpoint tensor's gradient in one step, and what Adam makes of it, measured by the oracle."""

    owed = (Owed(anyone, per_gradient),)

    gradient_scale: Real
    """Greatest element of transformers' gradient."""
    gradient: Measurement | None = None
    """Distance of the trainer's gradient from transformers'; None where the trainer has no gradient."""
    gradient_dtype: Dtype = "float32"
    """Dtype of the trainer's gradient."""
    gradient_doubt: Real = 0.0
    """Greatest change of transformers' gradient if log-probabilities move by what two right sides may differ by, and
    if each token's probability is rounded to float32."""
    gradient_rounding: Real = 0.0
    """Greatest distance of transformers' gradient in float32 from that in float64, over passes that round anew; 0 where
    the trainer's is so near that nobody looked (ADR 0103)."""
    gradient_noise: Real = 0.0
    """Greatest noise of any tensor's gradient in the run's dtype, in units of its greatest element."""
    gradient_norm: Real
    """L2 norm of all the trainer's gradients of that version."""
    group: str = ""
    """The tensor's name, or one for all experts' tensors of its kind in its layer; empty without a gradient."""
    group_length: Real = 1.0
    """Length of the trainer's gradients of the group along transformers', in units of theirs."""
    group_noise: Real = 0.0
    """Distance of transformers' own gradients of the group in the run's dtype, in units of their length."""
    noise_passes: Count = 1
    """Passes of transformers in the run's dtype, each rounded anew, that `gradient_noise` and `group_noise` are the
    greatest of."""
    loss: Real
    """Mean over the tokens in the loss by transformers, nats."""
    loss_scale: Real
    """Mean magnitude of a token's loss, nats."""
    loss_noise: Real = 0.0
    """Mean difference of a token's loss that the run's dtype makes, nats; of sampled steps of training the sum. With
    what rounding of log-probabilities to float32 changes it by."""
    loss_noise_error: Real = 0.0
    """Standard error of `loss_noise`, nats."""
    num_tokens: Count
    """Tokens in the loss."""
    acting: Count | None = None
    """Tokens in the loss with a gradient of their own; None where nobody counted."""
    step: Measurement | None = None
    """Distance of the live weight from Adam's; None where the trainer has no gradient."""
    update: Count = 0
    """Number of the optimizer step in a training run, from 1; 0 where each version has one."""


class LogprobRecord(ArrayRecord, frozen=True, kw_only=True):
    """Log-probabilities of tokens; the array [sum of lengths] is in nats, sequence after sequence."""

    lengths: Lengths


class TrainerLogprobs(LogprobRecord, frozen=True, kw_only=True, tag="logprob/trainer"):
    """Teacher-forced, by the trainer; float32."""

    owed = (Owed(anyone, per_score),)

    temperature: float = 1.0
    """Divisor of the logits."""


class ReturnedLogprobs(Record, frozen=True, kw_only=True, tag="logprob/returned"):
    """Digest of the log-probabilities that one trainer rank got back."""

    owed = (Owed(every_rank, if_scored),)
    is_side = False

    digest: Digest


class OracleRecord(LogprobRecord, frozen=True, kw_only=True):
    """Log-probabilities by transformers in float32, log-softmax in float64.

    In a float32 run also ``scale`` [sum of lengths] float64, nats: the root mean square, over the vocabulary, of what
    float32 changes the log-probabilities of each place by, against float64 on the same weights.
    """

    whole: Lengths = ()
    """Tokens of each sequence, with those before the first scored one."""


class OracleLogprobs(OracleRecord, frozen=True, kw_only=True, tag="logprob/oracle"):
    """Teacher-forced, by the oracle."""

    owed = (Owed(anyone, per_score),)


class OracleOfSampled(OracleRecord, frozen=True, kw_only=True, tag="logprob/sampled-oracle"):
    """Log-probabilities by the oracle of tokens that the engine sampled."""

    owed = (Owed(anyone, per_sample),)


class OracleOfShaped(OracleRecord, frozen=True, kw_only=True, tag="logprob/shaped-oracle"):
    """Oracle's log-probabilities of shaped requests; the nearest value where rounding decides what truncation keeps."""

    owed = (Owed(anyone, at_ends),)
    is_side = False


class OracleOfNext(ArrayRecord, frozen=True, kw_only=True, tag="logprob/next"):
    """Distribution of the next token by the oracle; the array [vocabulary] float64 is in nats."""

    owed = (Owed(anyone, if_drawn),)


class OracleOfPlaces(ArrayRecord, frozen=True, kw_only=True, tag="logprob/places"):
    """Oracle's distribution at each of N sampled tokens, sample after sample, greedy ones apart.

    Arrays: ``rank`` [N] int64, number of likelier tokens; ``kept`` [N, S] int64, number of the likeliest tokens that
    have each of `SHARES` together; ``rest`` [N, S] float64, probability of the others; ``earlier`` [N, L] float64,
    probability of the token sampled 1, ..., L places before, NaN where there is none; ``repeats`` [N, L] bool, whether
    it is the one sampled.
    """

    owed = (Owed(anyone, per_version),)

    vocabulary: Count
    """Ids that the model has; a sampled one beyond is described as id 0."""


ROUNDINGS = 12
"""Times the scale of float32's rounding that two right log-probabilities of a place may differ by. Seven standard
deviations, which a normal number exceeds with a chance of 2.6e-12, of a difference whose variance is three times the
oracle's own at most: its own one, and up to two of a kernel that adds in another order (1.0 to 1.1 were measured).
That is where many directions add up; where one dominates, see ADR 0080."""


class NoiseRecord(Record, frozen=True, kw_only=True):
    """Differences of log-probabilities of the same tokens between two arithmetics, nats."""

    is_side = False

    greatest: Real
    mean: Real
    deviation: Real
    scale: Real = 0.0
    """Root mean square of `OracleRecord`'s ``scale`` over the tokens; 0 unless it is of float32."""
    coarsest: Real = 0.0
    """Greatest of these scales."""
    routed: bool = False
    """Tokens of a training run whose routers chose for themselves and flip: few of them have most of the noise."""


class DtypeNoise(NoiseRecord, frozen=True, kw_only=True, tag="logprob/noise"):
    """Noise of transformers in the run's dtype against float32, or of float32 against float64."""

    owed = (Owed(anyone, per_noise),)


class SampledNoise(NoiseRecord, frozen=True, kw_only=True, tag="logprob/sampled-noise"):
    """Noise of the run's dtype on the tokens of a step that the weights before it sampled, or of the last such step.

    Differences are transformers in that dtype minus transformers in float32, at the run's temperature.
    """

    owed = (Owed(anyone, if_measured),)

    measured: Count
    """Version of the weights that it was measured on."""
    tokens: Count
    squares: Real
    """Mean of the squares, nats squared."""
    squares_deviation: Real
    """Standard deviation of the squares, nats squared."""
    p99: Real
    """99th percentile of the magnitudes."""
    bias: Real
    """Mean of the signed differences."""
    slope: Real
    """Slope of the differences over log-probability: what another temperature makes."""
    slope_error: Real
    """Its standard error."""
    by_position: tuple[float | None, ...]
    """Mean magnitude in each eighth of the longest allowed answer; None for an eighth without tokens."""
    greatest_of_run: Real = 0.0
    """Greatest magnitude in this and all earlier sampled steps, nats."""
    unsure: Real = 1.0
    """Mean of 1 - p over the tokens. Noise of a log-probability grows as 1 - p does."""
    unsure_squares: Real = 1.0
    """Mean of the squares of 1 - p."""
    most_unsure: Real = 1.0
    """Greatest 1 - p."""
    drawn: bool = False
    """The tokens are random ones, measured before the first step of a run that samples no step."""


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

    owed = (Owed(anyone, per_version),)


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

    owed = (Owed(anyone, at_ends),)
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


class OracleEnds(ArrayRecord, frozen=True, kw_only=True, tag="logprob/ends"):
    """Probability that a draw was an end token, by transformers in float32, at each token that one version sampled.

    The array [N] float64 goes over the tokens of `SampledTokens` of the same name and version, in order.
    """

    ends: tuple[Count, ...]
    """Tokens whose probabilities are added."""
    temperature: float
    """Divisor of the logits."""
    noise: Real
    """Sum of the distances of the same by weights of the run's dtype, or of float64."""
