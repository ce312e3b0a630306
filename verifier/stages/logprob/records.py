"""Records of the stage `logprob`: trainer forward and log-probabilities."""

from __future__ import annotations

from typing import Literal

import msgspec

from verifier.core.owed import (
    Owed,
    anyone,
    at_last,
    every_rank,
    if_drawn,
    if_measured,
    if_scored,
    last_stage,
    once,
    per_noise,
    per_pass,
    per_sample,
    per_score,
    per_step,
    per_update,
    per_version,
    provider_rank,
)
from verifier.core.record import ArrayRecord, Count, Digest, RankArrays, RankRecord, Real, Record, TensorRecord
from verifier.stages.load.records import ConfigRecord
from verifier.stages.replay.records import LogprobRecord, OracleRecord


class ActivationRecord(ArrayRecord, frozen=True, kw_only=True):
    """Values at one point of the model on one rank; the record's name is the point's, such as "layers.0.output".

    Arrays: ``values`` [N, W] float32, the rows of real tokens; ``sequence`` and ``position`` [N] int32, the token of
    each row; ``columns`` [W] int32, the place of each column in the whole vector as the oracle orders it.
    """

    step: str
    """Pass over the tokens: "score" or "train"; "moved", [N, 1], is how far small changes before layers move a row."""
    order: Count
    """Place of the point in the order of the data flow."""
    coordinate: str = ""
    """Mesh coordinate of the rank."""


class Activation(ActivationRecord, frozen=True, kw_only=True, tag="logprob/activation"):
    """Output of a module, or where the name says so what goes into one."""


class PointsLeftOut(Record, frozen=True, kw_only=True, tag="logprob/left-out"):
    """Points that one side does not have in a form to be compared with the other's; the name is the side's."""

    points: tuple[str, ...]


LAYER_WINDOWS = "windows of layers"
"""Key of `ProviderFields`: number of each layer that a rank has -> rows before its own that a row attends to."""
NORM_EPSILONS = "epsilons of norms"
"""Key of `ProviderFields`: path of the decoder's norms, with * for the number of the layer -> their epsilons."""
ROTARY_FREQUENCIES = "frequencies of rotary embeddings"
"""Key of `ProviderFields`: path of a module -> the frequencies of its pairs, radians a position; not of YaRN's."""


class ProviderFields(ConfigRecord, frozen=True, kw_only=True, tag="logprob/provider"):
    """Plain fields of megatron-bridge's provider, which is Megatron's TransformerConfig; functions by their name."""

    owed = (Owed(provider_rank, once),)


ARRAYS_OF_PACK = ("cu_seqlens_q", "cu_seqlens_kv", "cu_seqlens_q_padded", "cu_seqlens_kv_padded")
NUMBERS_OF_PACK = ("max_seqlen_q", "max_seqlen_kv", "total_tokens", "pad_between_seqs")
"""Arguments of a packed forward pass, by Megatron's names."""


class GivenArguments(Record, frozen=True, kw_only=True, tag="logprob/arguments"):
    """Arguments of one model chunk's forward pass over one packed micro-batch: fields of PackedSeqParams."""

    owed = (Owed(every_rank, per_pass),)

    chunk: Count
    """Virtual pipeline stage."""
    num_rows: Count
    """Rows of the tokens that it is given."""
    cu_seqlens_q: tuple[int, ...] | None = None
    cu_seqlens_kv: tuple[int, ...] | None = None
    cu_seqlens_q_padded: tuple[int, ...] | None = None
    cu_seqlens_kv_padded: tuple[int, ...] | None = None
    max_seqlen_q: int | None = None
    max_seqlen_kv: int | None = None
    total_tokens: int | None = None
    pad_between_seqs: int | None = None
    """0 or 1."""
    lacks: tuple[str, ...] = ()
    """Names of those that the installed Megatron does not take."""


class OracleEntropy(ArrayRecord, frozen=True, kw_only=True, tag="logprob/entropy"):
    """Entropy by transformers in float32 at each token in the loss of one update.

    Arrays [N] float64, nats: ``array``; ``scale``, most that differences of logits of the size of their
    rounding to the run's dtype change it by.
    """

    owed = (Owed(anyone, per_update),)

    temperature: float
    """Divisor of the logits."""
    noise: Real
    """Greatest distance by weights of the run's dtype, or of float64, at any token of the rollouts; nats."""
    rollouts: tuple[Count, ...] | None = None
    """Places of the rollouts, among those of the update, that these are of; None for all."""


class ScoredRows(RankArrays, frozen=True, kw_only=True, tag="logprob/rows"):
    """Rows of a pass that scored a mini-batch of a step, on one rank, as the rank made them; every array is [T].

    ``sentinel`` int64 as in `TokenLedger`, of the batch's rollouts; ``logprob`` float32, nats.
    """

    owed = (Owed(last_stage, per_step),)

    which: str
    """Weights: "current", which make `old`, or "reference"."""
    ids: tuple[str, ...]
    """Rollouts of the batch."""


class SpotScore(ArrayRecord, frozen=True, kw_only=True, tag="logprob/spot"):
    """One rollout of a step that the trainer scored by itself, alone in its pack, before the step's first update.

    Arrays [L - 1] float32, nats: ``current`` by the weights as they were, ``reference`` where there is one; and the
    first ones of ``current`` again, ``beginning``, where the rollout was scored without its end.
    """

    owed = (Owed(anyone, per_step),)

    id: str
    """Id of the rollout, which a rule of seed, step and mini-batches chooses."""
    seed: int
    """Seed of the run."""
    step: Count
    mini_batches: Count
    """0 where a recorded loop chose the rollout."""
    temperature: float = 1.0
    """Divisor of the logits."""


class ReferenceShard(TensorRecord, frozen=True, kw_only=True, tag="logprob/reference"):
    """One live tensor of a rank while it scored as the reference."""

    owed = (Owed(every_rank, per_step),)

    frozen: Digest
    """Content of the reference's tensor when the run was loaded."""
    begun: Digest | None = None
    """Content of the live tensor when the run was loaded; None beyond the first step, and after a resume."""


SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Share of the likeliest tokens of a distribution; samples beyond are counted. Truncation leaves none beyond."""


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


class OracleLogprobs(OracleRecord, frozen=True, kw_only=True, tag="logprob/oracle"):
    """Teacher-forced, by the oracle."""

    owed = (Owed(anyone, per_score),)


class OracleOfSampled(OracleRecord, frozen=True, kw_only=True, tag="logprob/sampled-oracle"):
    """Log-probabilities by the oracle of tokens that the engine sampled."""

    owed = (Owed(anyone, per_sample),)


class OracleOfShaped(OracleRecord, frozen=True, kw_only=True, tag="logprob/shaped-oracle"):
    """Oracle's log-probabilities of shaped requests; the nearest value where rounding decides what truncation keeps."""

    owed = (Owed(anyone, at_last),)
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
    places: Count = 0
    """Places behind the prompts that these tokens are at: samples of one prompt share them, and much of their noise.
    0: as many as tokens."""
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
    partly: bool = False
    """The tokens are those of some of the step's rollouts."""


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


class AdapterScale(msgspec.Struct, frozen=True, kw_only=True):
    """Factor by which one adapter multiplied the output of its second matrix, in one pass."""

    name: str
    scale: Real
    """Factor by least squares."""
    gap: Real
    """Greatest distance of an element of the adapter's output from what was asked for."""
    greatest: Real
    """Greatest magnitude of what was asked for."""
    altered: Real = 0.0
    """Greatest distance of an element that its first matrix was given from what the adapter was."""
    dtype: Literal["float32", "bfloat16"]


class AdapterScales(RankRecord, frozen=True, kw_only=True, tag="logprob/adapter-scales"):
    """Factors of the adapters of one rank, in the first pass of one optimizer step."""

    owed = (Owed(every_rank, per_update),)

    asked: float
    """Alpha over rank, as the config asks."""
    adapters: tuple[AdapterScale, ...]
