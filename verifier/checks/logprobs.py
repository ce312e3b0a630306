"""Log-probabilities of the same tokens from trainer, engine and the fp32 oracle, and what they may differ by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from verifier.checks.content import owner_of, times
from verifier.checks.repeated_tokens import counted_once, repeated_tokens
from verifier.core import ragged
from verifier.core.check import check
from verifier.core.comparison import Comparison, Tolerance, describe_difference
from verifier.core.record import Record
from verifier.core.records_tokens import (
    DrawnTokens,
    DtypeNoise,
    EngineLogprobs,
    EngineNoise,
    GivenRoutes,
    LogprobRecord,
    NoiseRecord,
    OracleLogprobs,
    OracleOfNext,
    OracleOfSampled,
    OracleOfShaped,
    OracleRecord,
    ReturnedLogprobs,
    SampledTokens,
    SampleRecord,
    ShapedTokens,
    StoredFloor,
    TrainerLogprobs,
)
from verifier.core.stage import Stage
from verifier.core.trace import Trace

FP32 = Tolerance(
    absolute=1e-5, unit="nats", source="fp32 on CPU: Megatron, vLLM and transformers agree to 6.2e-6 on tiny models"
)
FP32_NOISES = 2
"""Times the greatest noise of fp32 that a token may differ by: each of two sides may be off by it."""
FEW_TOKENS = 100
"""Below this many tokens a mean says less than the greatest difference does, and is not judged."""
NOISES = 2
"""Times all other noises that are allowed: a stored floor's, the greatest of a whole run, and the mean of one set."""
GREATEST_NOISES = 3
"""Times the greatest noise of one set that a token may differ by: it is the greatest of a few hundred at most."""
LEAST_NATS = 0.5
"""Below this a log-probability is a small difference of great numbers, and has few bits by itself."""
FEW_VALUES = 4
"""Fewer values than these may all have few bits by chance."""
FLIPS = Tolerance(
    absolute=math.inf, unit="nats", source="a token whose router flips in less than float32 is off by a size of its own"
)
STATISTICS: dict[str, Callable[[np.ndarray], np.floating]] = {"mean": np.mean, "median": np.median}
"""Statistics of the differences of all tokens."""
ORACLE = "the fp32 oracle"
SAMPLER = "the engine's sampler"


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Allowed absolute differences, nats."""

    greatest: tuple[Tolerance, ...]
    """Bound on any token, per sequence."""
    body: Mapping[str, Tolerance] = field(default_factory=dict)
    """Bound on a statistic over all tokens, "mean" or "median"."""
    once: np.ndarray | None = None
    """Numbers of all tokens, if those with one number count once in them."""


def bounds_of(
    trace: Trace, stage: Stage, name: str, version: int, lengths: Sequence[int], whole: Sequence[int] = (),
    temperatures: Sequence[float] = (), numbers: np.ndarray | None = None,
) -> Bounds:  # fmt: skip
    """Return what one scoring may differ from the oracle by; the stage is that of the actual side.

    `lengths` are the log-probabilities of each sequence, `whole` its tokens, with those before the first scored one;
    unknown where empty. `temperatures` are those of each sequence, 1 where empty. `numbers` say which tokens are
    repeated: against a floor, whose tokens all differ, they count once.

    In fp32 they are fixed, for checkpoints that are no coarser than those the bound was measured on; the run has
    measured the others: transformers in fp32 against itself in float64, at version 0, and on sampled steps of training,
    whose weights sharpen, on the step's own tokens. A temperature below 1 magnifies what float32 rounds of logits.

    In bf16 they are twice the stored noise floor of sequences of that length, where the run's checkpoint has one;
    otherwise they come from the run: transformers in bf16 against transformers in fp32, on the same tokens and weights.
    The greatest of few tokens misses most flips of a router: twice the greatest of the whole run is allowed, if more.
    Of a training run's mixture single tokens are not judged: a step has few, and each that flips has its own size.
    Of an engine that quantizes its weights they come from that engine at version 0, where it is a cold one, by its
    start or by ENG002; at version 0 itself they say nothing.

    Raises:
        LookupError: a bf16 run without a floor has not measured its noise.
    """
    if trace.manifest.dtype == "float32":
        coarse = [float(item.greatest) for item in trace.of(DtypeNoise, version=0) if item.name in (name, "scored")]
        bound, factor = FP32_NOISES * max(coarse, default=0.0), FP32_NOISES
        if trace.manifest.command == "train":
            of_step = [float(item.greatest) for item in trace.of(DtypeNoise, version=version) if item.name == name]
            if (more := GREATEST_NOISES * max(of_step, default=0.0)) > bound:
                bound, factor = more, GREATEST_NOISES
        source = f"this run's noise: transformers in fp32 against itself in float64, times {factor}"
        own = Tolerance(absolute=bound, unit=FP32.unit, source=source)
        fixed = [at_temperature(FP32, value) for value in temperatures or [1.0] * len(lengths)]
        return Bounds(greatest=tuple(max(item, own, key=lambda item: item.absolute) for item in fixed))
    measured: list[NoiseRecord] = []
    floors: list[StoredFloor] = []
    if stage is Stage.ROLLOUT:
        measured += trace.of(EngineNoise, version=version, name=name)
    if not measured and stage is not Stage.REPLAY:  # a floor is of routers that flip; those that are told do not
        floors = _floors(trace, whole)
    measured += trace.of(DtypeNoise, version=version, name=name)
    if not floors and not measured:
        raise LookupError(f"no measured noise of `{name}` for version {version}")
    noises: Sequence[NoiseRecord] = floors or measured[:1] * len(lengths)
    greatest = [FLIPS if noise.routed else _bound(noise, "greatest") for noise in noises]
    if not floors and stage is not Stage.REPLAY:
        forced = {item.name for item in trace.of(GivenRoutes)}
        free = (noise for noise in trace.of(type(measured[0])) if noise.name not in forced)
        noisiest = max(free, key=lambda noise: float(noise.greatest), default=measured[0])
        of_run = _bound(noisiest, "greatest", of_run=True)
        greatest = [max(own, of_run, key=lambda bound: bound.absolute) for own in greatest]
    body, once = {}, numbers if floors else None
    if sum(lengths) >= FEW_TOKENS:
        for statistic in ("mean", "median") if floors else ("mean",):
            noisiest = max(noises, key=lambda noise: float(getattr(noise, statistic)))
            body[statistic] = _bound(noisiest, statistic, sum(lengths) if once is None else len(np.unique(once)))
    return Bounds(greatest=tuple(greatest), body=body, once=once)


def at_temperature(bound: Tolerance, temperature: float) -> Tolerance:
    """Bound of log-probabilities at a temperature, whose logits differ by as much at 1 and are divided by it after."""
    if not 0 < temperature < 1:  # 0 stands for the likeliest token of undivided logits
        return bound
    source = f"{bound.source}; divided by a temperature of {temperature:g}, as logits are"
    return replace(bound, absolute=bound.absolute / temperature, source=source)


def _temperatures(item: LogprobRecord) -> Sequence[float]:
    """Temperature of each sequence; nothing where it is not said."""
    if isinstance(item, TrainerLogprobs):
        return [item.temperature] * len(item.lengths)
    return item.temperatures if isinstance(item, SampleRecord) else ()


def _floors(trace: Trace, whole: Sequence[int]) -> list[StoredFloor]:
    """Per sequence, the floor of its length; none at all if a sequence is longer than every bucket."""
    buckets = sorted(trace.of(StoredFloor), key=lambda floor: floor.longest)
    if not buckets or max(whole, default=0) > buckets[-1].longest:
        return []
    return [next(floor for floor in buckets if length <= floor.longest) for length in whole]


def _bound(noise: NoiseRecord, statistic: str, num_tokens: int = 0, *, of_run: bool = False) -> Tolerance:
    """Bound on the greatest of a sequence or `of_run`, of thousands of tokens, or on the mean or median of all tokens.

    A mean of few scatters, so it gets three standard errors more, and so does a median: that of an exponential
    distribution scatters as its mean does, that of one with heavier tails less. Measured on a DeepSeek-V3 with 16
    experts, whose router flips in bf16: 0.06 nats on the mean of 262 tokens, and 0.18 on that of 8 sampled ones of the
    same weights; so a mean of few is not judged at all.

    There is none on upper quantiles, where a mixture's router begins to flip: on clean runs of 262 tokens
    the 0.9 quantile was 0.3 to 2.2 times the floor's, the median 0.6 to 1.3 times.
    """
    allowed = NOISES if of_run or statistic != "greatest" or isinstance(noise, StoredFloor) else GREATEST_NOISES
    bound, more = allowed * float(getattr(noise, statistic)), ""
    if statistic != "greatest":
        bound, more = bound + 3 * float(noise.deviation) / math.sqrt(num_tokens), " and three standard errors"
    if isinstance(noise, StoredFloor):
        floor = f"the {statistic} of the noise floor for up to {noise.longest:,} tokens"
        source = f"{allowed} x {floor}{more}, {noise.stored}"
    else:
        by = "the quantized engine, cold," if isinstance(noise, EngineNoise) else "transformers in the run's dtype"
        over = "greatest of all tokens, " if of_run else ""
        source = f"this run's noise: {over}{by} against transformers in fp32, times {allowed}{more}"
    return Tolerance(absolute=bound, unit="nats", source=source)


def compare_with_oracle(
    trace: Trace,
    kind: type[LogprobRecord],
    oracle: type[OracleRecord],
    actual_says: str,
    *,
    hint: str = "",
    expected_says: str = ORACLE,
    version: int | None = None,
    third: type[LogprobRecord] | None = None,
) -> Iterator[Comparison]:
    """One comparison per sequence of every scoring, token by token, within the bounds of the actual side's stage.

    Where a `third` side scored the same and agrees with the actual one, a mismatch names the expected one as suspect.

    Raises:
        LookupError: the oracle did not score what the actual side did.
    """
    for actual in trace.of(kind, version=version):
        expected = next(trace.of(oracle, name=actual.name, version=actual.version), None)
        if expected is None:
            raise LookupError(f"nobody else scored `{actual.name}` of version {actual.version}")
        got, want, lengths = trace.array(actual), trace.array(expected), expected.lengths
        if actual.lengths != lengths or got.size != sum(lengths) or want.size != sum(lengths):
            yield Comparison(
                what=actual.name, same=False, stage=actual.stage, version=actual.version, badness=1.0,
                sentence=f"{actual_says} scored other numbers of tokens than {expected_says}",
                expected=str(list(lengths)), actual=str(list(actual.lengths)), allowed="exact",
            )  # fmt: skip
            continue
        asked = (expected.name, expected.version, lengths, expected.whole, _temperatures(actual))
        bounds = bounds_of(trace, actual.stage, *asked, repeated_tokens(trace, actual, lengths))
        other = next(trace.of(third, name=actual.name, version=actual.version), None) if third else None
        heard = trace.array(other) if other is not None and other.lengths == lengths else np.full_like(got, np.nan)
        sides = [ragged.split(side, lengths) for side in (got, want, heard)]
        rows = zip(*sides, bounds.greatest, strict=True)
        for number, (left, right, voice, bound) in enumerate(rows):
            found = _compare_one(actual, f"sequence {number}", left, right, bound, actual_says, expected_says, hint)
            agreed = describe_difference(left, voice)
            if not (found.same or agreed.num_not_finite) and agreed.greatest <= bound.absolute:
                found = _suspecting(found, agreed.greatest, expected_says)
            yield found
        if trace.manifest.dtype != "float32":  # where it is, the bound on each token says so
            yield _rounded(actual, got, actual_says)
        for name, bound in bounds.body.items():
            gaps = np.abs(got.astype(np.float64) - want.astype(np.float64))
            value = float(STATISTICS[name](gaps if bounds.once is None else counted_once(gaps, bounds.once)))
            yield Comparison(
                what=f"{actual.name} {name}", same=value <= bound.absolute, stage=actual.stage, version=actual.version,
                badness=times(value, bound.absolute),
                sentence=f"log-probabilities of {actual_says} and {expected_says} differ by {value:.3g} nats "
                f"on the {name}, {bound.absolute:.3g} is allowed",
                owner=owner_of(actual), allowed=str(bound), hint=hint,
            )  # fmt: skip


def _compare_one(
    actual: Record, what: str, left: np.ndarray, right: np.ndarray, bound: Tolerance,
    actual_says: str, expected_says: str, hint: str,
) -> Comparison:  # fmt: skip
    """Two sides' values of one sequence."""
    found = describe_difference(left, right)
    sentence = (
        f"log-probabilities of {actual_says} and {expected_says} differ by up to {found.greatest:.3g} nats "
        f"on {what}, {bound.absolute:.3g} is allowed"
    )
    for values, says in ((right, expected_says), (left, actual_says)):
        if count := int((~np.isfinite(values)).sum()):
            sentence = f"{count:,} of {values.size:,} log-probabilities that {says} gives for {what} are not finite"
    return Comparison(
        what=f"{actual.name} {what}", same=found.greatest <= bound.absolute and not found.num_not_finite,
        stage=actual.stage, version=actual.version, sentence=sentence, owner=owner_of(actual),
        badness=math.inf if found.num_not_finite else times(found.greatest, bound.absolute),
        expected=f"{_head(right)} ({expected_says})", actual=f"{_head(left)} ({actual_says})",
        mismatched=found.text, allowed=str(bound), hint=hint,
    )  # fmt: skip


def _suspecting(found: Comparison, gap: float, expected_says: str) -> Comparison:
    """The finding where two of three sides agree: they share no code, so the one that stands alone is suspect."""
    return replace(
        found, sentence=f"{found.sentence}; trainer and engine agree within {gap:.3g}: suspect {expected_says}",
        hint="trainer and engine share no code and agree: see first whether transformers reads all of config.json "
        "(MiniMax-M2's `rotary_dim` it does not: transformers #48241)",
    )  # fmt: skip


def _rounded(actual: Record, got: np.ndarray, actual_says: str) -> Comparison:
    """Test for values of few bits, small ones apart: rounded after they were computed, which noise would hide.

    A difference of float32 logits of 32 and less has 18 bits where it is `LEAST_NATS` or more; the last ten are zeros
    by chance for one in a thousand.
    """
    values = got.astype(np.float32)[np.abs(got) >= LEAST_NATS]
    coarse = len(values) >= FEW_VALUES and not (values.view(np.uint32) & 0xFFFF).any()
    return Comparison(
        what=f"{actual.name} precision", same=not coarse, stage=actual.stage, version=actual.version,
        badness=1.0, owner=owner_of(actual),
        sentence=f"all {len(values):,} log-probabilities of {actual_says} are rounded to bfloat16",
        expected="float32, as they are computed", actual=f"{_head(values)}, 8 bits each", allowed="not all of them",
        hint="look at the dtype of the logits' softmax, and of what hands its result on",
    )  # fmt: skip


def _head(values: np.ndarray) -> str:
    return "[" + ", ".join(f"{float(v):.5g}" for v in values[:3]) + (", ..." if values.size > 3 else "") + "]"


def following(trace: Trace, drawn: DrawnTokens) -> OracleOfNext:
    """The oracle's distribution, over the whole vocabulary, of what was drawn."""
    for item in trace.of(OracleOfNext, name=drawn.name, version=drawn.version):
        return item
    raise LookupError(f"nobody gave the distribution of `{drawn.name}` of version {drawn.version}")


def _of_drawn(nats: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Log-probabilities of drawn tokens; minus infinity beyond the vocabulary."""
    return np.array([nats[token] if token < len(nats) else -math.inf for token in tokens], np.float64)


@check("LGP001", needs=(TrainerLogprobs, OracleLogprobs), scope="logprob", also="scored")
def trainer_logprob_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The trainer scores tokens as transformers in fp32 does with the same weights.

    What it checks: teacher-forced log-probabilities, token by token, at every version, against an independent
    implementation that holds the trainer's own live weights (joined without Megatron-Bridge; of a family without a
    layout row, the exported ones); and that every rank gets the same ones back. At version 0 at a temperature too, and,
    of a model without experts, of a sequence of 1,000 tokens.
    On sampled steps of a training run (`verify.every`) `old` of all rollouts, by the weights before the step, and
    `reference`, by the checkpoint that the run began with, at the run's temperature.
    Why it matters: import and export that are wrong alike, a wrong rope base, epsilon or scaling, a misplaced label:
    all leave the round trip an identity.
    Evidence: logprob/trainer, logprob/oracle (arrays).
    Tolerance and its source: fp32 1e-5 nats, measured agreement 6.2e-6, divided by a temperature below 1; on sampled
    steps three times what transformers in fp32 differs by from itself in float64, if that is more. bf16 twice the
    checkpoint's stored noise floor for sequences of that length, by token, mean and median, or without one the run's
    own noise. NaN and infinity are never allowed, on neither side.
    What it does not catch: what no scored token exercises (an expert that none is routed to: WGT001).
    References: Megatron-Bridge#3743, slime#1734, RL#1046, verl#4250, vllm and trl rows of the catalogue.
    """
    yield from compare_with_oracle(
        trace, TrainerLogprobs, OracleLogprobs, "the trainer", third=EngineLogprobs,
        hint="if the loaded shards are right, look at the forward: rope, epsilon, scaling, masks, label alignment",
    )  # fmt: skip
    first: dict[tuple[str, int], ReturnedLogprobs] = {}
    for item in trace.of(ReturnedLogprobs):  # each rank goes on with what it got, not with what rank 0 did
        expected = first.setdefault((item.name, item.version), item)
        if expected is item:
            continue
        yield Comparison(
            what=f"{item.name} on rank {item.rank}", same=item.digest == expected.digest, stage=Stage.LOGPROB,
            version=item.version, badness=1.0, owner=owner_of(item),
            sentence=f"{owner_of(item)} got other log-probabilities than the first rank",
            expected=f"{expected.digest} (the first rank)", actual=item.digest, allowed="exact (they are copied)",
            hint="look at the groups over which scores are gathered from the last stage",
        )  # fmt: skip


@check("LGP002", needs=(EngineLogprobs, OracleLogprobs), scope="rollout")
def engine_logprob_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The engine scores tokens as transformers in fp32 does with the trainer's weights, before and after each sync.

    What it checks: teacher-forced log-probabilities, token by token; of conversations too, of which the engine's prefix
    cache holds the beginning.
    Why it matters: it sees what the engine computes, whatever its tensors look like.
    Evidence: rollout/engine, logprob/oracle (arrays).
    Tolerance and its source: as LGP001.
    What it does not catch: what no scored token exercises (ENG001).
    References: SkyRL#1680, trl#5312, vllm#44371, vllm#42019.
    """
    return compare_with_oracle(
        trace, EngineLogprobs, OracleLogprobs, "the engine", third=TrainerLogprobs,
        hint="if the engine's tensors are right, look at what its forward reads besides: caches, buffers, config",
    )  # fmt: skip


@check("LGP003", needs=(SampledTokens, OracleOfSampled), scope="rollout", also="sampled")
def sampled_logprob_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The log-probabilities reported with sampled tokens are those of the synced weights.

    What it checks: tokens generated from prompts of several cache blocks, which were filled before the sync, scored
    again by the oracle; tokens generated from them once more, when the cache holds them and samples end one after
    another; and two samples each of the conversations' next turn, whose beginning the engine itself sampled. One
    prompt begins as another does, one says in its midst what another says there, and one grows into a further block.
    At version 0 also tokens sampled side by side at several temperatures, whose log-probabilities are those of the
    logits divided by it; a greedy one's are the greatest. In fp32 also tokens whose requests ask for penalties, biases,
    allowed tokens and truncation, and the samples that LGP004 counts.
    On sampled steps of a training run every sampled token, by the weights of the version that the token claims.
    Why it matters: a prefix cache that outlives its weights answers from the old policy; log-probabilities of another
    distribution than was sampled from make every importance ratio wrong.
    Evidence: rollout/sampled, logprob/sampled-oracle, rollout/shaped, logprob/shaped-oracle, rollout/drawn,
    logprob/next (arrays).
    Tolerance and its source: as LGP001; where rounding decides which tokens a truncation keeps, from the nearest.
    What it does not catch: staleness of prompts shorter than a block (there is no cache entry); a greedy sample of
    another token that is reported as the likeliest.
    References: vLLM `reset_prefix_cache`, SkyRL#1212, verl#7511, vllm#394, vllm#14301, vllm#16863, RL#3497.
    """
    yield from compare_with_oracle(
        trace, SampledTokens, OracleOfSampled, SAMPLER,
        hint="look at caches that were filled before the sync: prefix blocks, graphs",
    )  # fmt: skip
    if trace.manifest.dtype != "float32":  # noise moves the edge of a truncated distribution
        return
    yield from compare_with_oracle(
        trace, ShapedTokens, OracleOfShaped, SAMPLER,
        hint="look at penalties, biases and truncation, and at which request of a batch they belong to",
    )  # fmt: skip
    for item in trace.of(DrawnTokens):
        bound = bounds_of(
            trace, item.stage, item.name, item.version, [len(item.tokens)], temperatures=[item.temperature]
        ).greatest[0]
        expected = _of_drawn(trace.array(following(trace, item)), item.tokens)
        yield _compare_one(
            item, "samples", trace.array(item), expected, bound, SAMPLER, ORACLE,
            "look at how the samples of one request are told apart, and who is given whose log-probabilities",
        )  # fmt: skip
