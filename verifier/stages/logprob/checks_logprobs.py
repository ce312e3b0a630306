"""Log-probabilities of the trainer against the fp32 oracle, and what they may differ by."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from verifier.core import ragged
from verifier.core.check import At, Comparison, Stage, Tolerance, Trace, check, compare_value, owner_of
from verifier.core.comparison import describe_difference
from verifier.core.condition import ALWAYS, on, recorded
from verifier.core.record import Record
from verifier.stages.checks_conditions import GRPO, SAMPLED, SCORED
from verifier.stages.logprob.records import (
    ROUNDINGS,
    DtypeNoise,
    EngineNoise,
    NoiseRecord,
    OracleLogprobs,
    ReturnedLogprobs,
    StoredFloor,
    TrainerLogprobs,
)
from verifier.stages.pack.records import Rollouts
from verifier.stages.replay.records import GivenRoutes, LogprobRecord, OracleRecord
from verifier.stages.rollout.records import EngineLogprobs, SampledTokens, SampleRecord

FP32 = Tolerance(absolute=1e-5, unit="nats", source="fp32: ten times the scale of rounding in tiny models")
"""Least that is allowed in fp32: what is below it is asked of nobody."""
FEW_TOKENS = 100
"""Below this many tokens a mean says less than the greatest difference does, and is not judged."""
NOISES = 2
"""Times all other noises that are allowed: a stored floor's, the greatest of a whole run, and the mean of one set."""
GREATEST_NOISES = 3
"""Times the greatest noise of one set that a token differs by rarely: it is the greatest of a few hundred at most. With
an exponential tail the greatest of n others is beyond r times it with a chance of n^(1 - r) times r factorial."""
RARE = 4.9
"""Standard deviations that a normal number is off by once in 1e6 times. A bound is twice what that makes, so that a
variance of four times the stated one gives no alarm (ADR 0109)."""
CHANCE = 1e-9
"""Chance that a number of tokens beyond the greatest of as many others is exceeded."""
FLIPS = Tolerance(
    absolute=math.inf, unit="nats", source="a token whose router flips in less than float32 is off by a size of its own"
)
STATISTICS: dict[str, Callable[[np.ndarray], np.floating]] = {"mean": np.mean, "median": np.median}
"""Statistics of the differences of all tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Allowed absolute differences, nats."""

    greatest: tuple[Tolerance, ...]
    """Bound on any token, per sequence."""
    body: Mapping[str, Tolerance] = field(default_factory=dict)
    """Bound on a statistic over all tokens, "mean" or "median"."""
    once: np.ndarray | None = None
    """Numbers of all tokens, if those with one number count once in them."""
    most: float = math.inf
    """Nats that a token counts as in them, if it is off by more."""


def bounds_of(
    trace: Trace, stage: Stage, name: str, version: int, lengths: Sequence[int], whole: Sequence[int] = (),
    temperatures: Sequence[float] = (), numbers: np.ndarray | None = None, apart: int | None = None,
    scales: np.ndarray | None = None,
) -> Bounds:  # fmt: skip
    """Return what one scoring may differ from the oracle by; the stage is that of the actual side.

    `lengths` are the log-probabilities of each sequence, `whole` its tokens, with those before the first scored one;
    unknown where empty. `temperatures` are those of each sequence, 1 where empty. `numbers` say which tokens are
    repeated: against a floor, whose tokens all differ, they count once. `apart` is how many tokens scatter by
    themselves, all by default: with fewer, as samples share prompts, a mean has the standard errors of so many, and the
    run's noisiest set for its own. `scales` are those of `OracleRecord`.

    In fp32 by the scale of what float32 rounds at each place, or at those of the whole scoring, of the version, or of
    version 0. In bf16 by the stored noise floor of sequences of that length, where the run's checkpoint has one, or by
    the run's own noise. Of a training run's mixture single tokens are not judged: each that flips has its own size. Of
    an engine that quantizes its weights by that engine, cold, at version 0. See docs/numerics.md.

    Raises:
        LookupError: a bf16 run without a floor has not measured its noise.
    """
    if trace.manifest.dtype == "float32":
        return _in_fp32(trace, name, version, lengths, temperatures or [1.0] * len(lengths), scales)
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
    of_body, num_tokens = [*noises], sum(lengths)
    apart = num_tokens if apart is None else apart
    greatest = [FLIPS if noise.routed else _bound(noise, "greatest") for noise in noises]
    if not floors and stage is not Stage.REPLAY:
        forced = {item.name for item in trace.of(GivenRoutes)}
        free = [noise for noise in trace.of(type(measured[0])) if noise.name not in forced]
        noisiest = max(free, key=lambda noise: float(noise.greatest), default=measured[0])
        if apart < num_tokens:
            of_body += free
        of_run = _bound(noisiest, "greatest", of_run=True)
        greatest = [max(own, of_run, key=lambda bound: bound.absolute) for own in greatest]
    body, once = {}, numbers if floors else None
    if num_tokens >= FEW_TOKENS:
        different = num_tokens if once is None else len(np.unique(once))
        for statistic in ("mean", "median") if floors else ("mean",):
            noisiest = max(of_body, key=lambda noise: float(getattr(noise, statistic)))
            body[statistic] = _bound(noisiest, statistic, min(different, apart))
    most = max((float(noise.greatest) for noise in noises if noise.routed), default=math.inf)
    return Bounds(greatest=tuple(greatest), body=body, once=once, most=most)


def _in_fp32(
    trace: Trace, name: str, version: int, lengths: Sequence[int], temperatures: Sequence[float],
    scales: np.ndarray | None,
) -> Bounds:  # fmt: skip
    measured = [*trace.of(DtypeNoise, version=version)] or [*trace.of(DtypeNoise, version=0)]
    fixed = [at_temperature(FP32, value) for value in temperatures]
    if scales is None:
        coarsest = max((float(item.coarsest) for item in measured), default=0.0)
        return Bounds(greatest=tuple(wider(item, rounding(coarsest)) for item in fixed))
    whole = max((float(item.scale) for item in measured if item.name == name), default=0.0)
    parts = zip(fixed, ragged.split(scales, lengths), strict=True)
    return Bounds(greatest=tuple(wider(item, rounding(float(part.max(initial=whole)))) for item, part in parts))


def rounding(scale: float, times: float = ROUNDINGS) -> Tolerance:
    """Bound of log-probabilities by the scale of what float32 rounds."""
    source = f"{times:g} x the scale of float32's rounding, transformers against itself in float64"
    return Tolerance(absolute=times * scale, unit="nats", source=source)


def most_beyond(tokens: int, others: int) -> int:
    """Most of `tokens` draws that chance puts beyond the greatest of `others` more, whatever distribution all are of.

    Source:
        Gumbel and von Schelling 1950, "The distribution of the number of exceedances": all of the k greatest are among
        n of n + m draws with a chance of at most (n / (n + m))^k; exceeded with one of `CHANCE`.
    """
    return math.ceil(math.log(CHANCE) / math.log(tokens / (tokens + others))) - 1


def wider(one: Tolerance, other: Tolerance) -> Tolerance:
    """The wider of two bounds; the first if they are equal."""
    return one if one.absolute >= other.absolute else other


def at_temperature(bound: Tolerance, temperature: float) -> Tolerance:
    """Bound of log-probabilities at a temperature, whose logits differ by as much at 1 and are divided by it after."""
    if not 0 < temperature < 1:  # 0 stands for the likeliest token of undivided logits
        return bound
    source = f"{bound.source}; divided by a temperature of {temperature:g}, as logits are"
    return replace(bound, absolute=bound.absolute / temperature, source=source)


def _floors(trace: Trace, whole: Sequence[int]) -> list[StoredFloor]:
    """Per sequence, the floor of its length; none at all if a sequence is longer than every bucket."""
    buckets = sorted(trace.of(StoredFloor), key=lambda floor: floor.longest)
    if not buckets or max(whole, default=0) > buckets[-1].longest:
        return []
    return [next(floor for floor in buckets if length <= floor.longest) for length in whole]


def _bound(noise: NoiseRecord, statistic: str, num_tokens: int = 0, *, of_run: bool = False) -> Tolerance:
    """Bound on the greatest of a sequence or `of_run`, of thousands of tokens, or on the mean or median of all tokens.

    A mean of few scatters, so it gets `RARE` standard errors more, and so does a median: that of an exponential
    distribution scatters as its mean does, that of one with heavier tails less. There is none on upper quantiles, where
    a mixture's router begins to flip: on clean runs the 0.9 quantile was 0.3 to 2.2 times the floor's.
    """
    few = statistic == "greatest" and not (of_run or isinstance(noise, StoredFloor))
    allowed = NOISES * GREATEST_NOISES if few else NOISES
    value, more = float(getattr(noise, statistic)), ""
    if statistic != "greatest":
        value, more = value + RARE * float(noise.deviation) / math.sqrt(num_tokens), f" and {RARE} standard errors"
    bound = allowed * value
    if isinstance(noise, StoredFloor):
        floor = f"the {statistic} of the noise floor for up to {noise.longest:,} tokens"
        source = f"{allowed} x {floor}{more}, {noise.stored}"
    else:
        by = "the quantized engine, cold," if isinstance(noise, EngineNoise) else "transformers in the run's dtype"
        over = "greatest of all tokens, " if of_run else ""
        source = f"this run's noise: {over}{by} against transformers in fp32, times {allowed}{more}"
    return Tolerance(absolute=bound, unit="nats", source=source)


LEAST_NATS = 0.5
"""Below this a log-probability is a small difference of great numbers, and has few bits by itself."""
FEW_VALUES = 4
"""Fewer values than these may all have few bits by chance."""
ORACLE = "the fp32 oracle"


def _temperatures(item: LogprobRecord) -> Sequence[float]:
    if isinstance(item, TrainerLogprobs):
        return [item.temperature] * len(item.lengths)
    return item.temperatures if isinstance(item, SampleRecord) else ()


def compare_with_oracle(
    trace: Trace,
    kind: type[LogprobRecord],
    oracle: type[OracleRecord],
    actual_says: str,
    *,
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
        scored = [*trace.of(oracle, name=actual.name, version=actual.version)]
        expected = next((item for item in scored if item.rank == actual.rank), next(iter(scored), None))
        if expected is None:
            raise LookupError(f"nobody else scored `{actual.name}` of version {actual.version}")
        got, want, lengths = trace.array(actual), trace.array(expected), expected.lengths
        if actual.lengths != lengths or got.size != sum(lengths) or want.size != sum(lengths):
            sentence = f"{actual_says} scored other numbers of tokens than {expected_says}"
            at, counts = At(actual.stage, actual.version), (list(actual.lengths), list(lengths))
            yield compare_value(at, actual.name, *counts, same=False, sentence=sentence, allowed="exact")
            continue
        asked = (expected.name, expected.version, lengths, expected.whole, _temperatures(actual))
        told_apart = repeated_tokens(trace, actual, lengths), tokens_apart(actual, lengths)
        bounds = bounds_of(trace, actual.stage, *asked, *told_apart, trace.arrays(expected).get("scale"))
        other = next(trace.of(third, name=actual.name, version=actual.version), None) if third else None
        heard = trace.array(other) if other is not None and other.lengths == lengths else np.full_like(got, np.nan)
        sides = [ragged.split(side, lengths) for side in (got, want, heard)]
        rows = zip(*sides, bounds.greatest, strict=True)
        for number, (left, right, voice, bound) in enumerate(rows):
            found = compare_one(actual, f"sequence {number}", left, right, bound, (actual_says, expected_says))
            agreed = describe_difference(left, voice)
            if not (found.same or agreed.num_not_finite) and agreed.greatest <= bound.absolute:
                heard_by = f"trainer and engine agree within {agreed.greatest:.3g}: suspect {expected_says}"
                found = replace(
                    found, sentence=f"{found.sentence}; {heard_by}", owner=f"{expected_says} (transformers)",
                    hint="trainer and engine share no code and agree: see first whether transformers reads all of "
                    "config.json",
                )  # fmt: skip
            yield found
        if trace.manifest.dtype != "float32":  # where it is, the bound on each token says so
            yield _rounded(actual, got, actual_says)
        for name, bound in bounds.body.items():
            gaps = np.minimum(np.abs(got.astype(np.float64) - want.astype(np.float64)), bounds.most)
            value = float(STATISTICS[name](gaps if bounds.once is None else counted_once(gaps, bounds.once)))
            subject = f"the {name} of what log-probabilities of {actual_says} and {expected_says} differ by, nats,"
            yield compare_value(actual, f"{actual.name} {name}", value, None, subject=subject, allowed=bound)


def compare_one(
    actual: Record, what: str, left: np.ndarray, right: np.ndarray, bound: Tolerance, says: tuple[str, str]
) -> Comparison:
    """Two sides' values of one sequence."""
    found = describe_difference(left, right)
    sentence = f"log-probabilities of {says[0]} and {says[1]} differ by up to {found.greatest:.3g} nats "
    sentence += f"on {what}, {bound.absolute:.3g} is allowed"
    for values, by in zip((right, left), says[::-1], strict=True):
        if count := int((~np.isfinite(values)).sum()):
            sentence = f"{count:,} of {values.size:,} log-probabilities that {by} gives for {what} are not finite"
    gap, sides = math.inf if found.num_not_finite else found.greatest, (_head(left), _head(right))
    compared = compare_value(
        actual, f"{actual.name} {what}", *sides, sentence=sentence, says=says, allowed=bound, gap=gap
    )
    return compared if compared.same else replace(compared, mismatched=found.text)


def _rounded(actual: Record, got: np.ndarray, actual_says: str) -> Comparison:
    """Test for values of few bits, small ones apart: rounded after they were computed, which noise would hide.

    A difference of float32 logits of 32 and less has 18 bits where it is `LEAST_NATS` or more; the last ten are zeros
    by chance for one in a thousand.
    """
    values = got.astype(np.float32)[np.abs(got) >= LEAST_NATS]
    coarse = len(values) >= FEW_VALUES and not (values.view(np.uint32) & 0xFFFF).any()
    sentence = f"all {len(values):,} log-probabilities of {actual_says} are rounded to bfloat16"
    what, sides = f"{actual.name} precision", (f"{_head(values)}, 8 bits each", "float32, as they are computed")
    hint = "look at the dtype of the logits' softmax, and of what hands its result on"
    return compare_value(actual, what, *sides, same=not coarse, sentence=sentence, hint=hint)


def _head(values: np.ndarray) -> str:
    return "[" + ", ".join(f"{float(v):.5g}" for v in values[:3]) + (", ..." if values.size > 3 else "") + "]"


@check(
    "LGP001", needs=(TrainerLogprobs, ReturnedLogprobs, OracleLogprobs, DtypeNoise),
    applies=on(roundtrip=ALWAYS, step=GRPO & SAMPLED, loop=recorded(TrainerLogprobs) & SCORED),
)  # fmt: skip
def trainer_logprob_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The trainer scores tokens as transformers in fp32 does with the same weights.

    What it checks: teacher-forced log-probabilities, token by token, at every version, against an independent
    implementation that holds the trainer's own live weights (joined without Megatron-Bridge; of a family without a
    layout row, the exported ones); and that every rank gets the same ones back. At version 0 at a temperature too, and,
    of a model without experts, of a sequence of 1,000 tokens. On sampled steps of a training run (`verify.every`) `old`
    of all rollouts, or of some (`verify.rollouts`), by the weights before the step, and `reference`, by the checkpoint
    that the run began with, at the run's temperature.
    Why it matters: import and export that are wrong alike, a wrong rope base, epsilon or scaling, a misplaced label:
    all leave the round trip an identity.
    Evidence: logprob/trainer, logprob/oracle (arrays).
    Tolerance and its source: fp32 12 times the scale of rounding at each place: the root mean square over the
    vocabulary of what transformers in fp32 differs by from itself in float64; 1e-5 nats at least, divided by a
    temperature below 1. Chance of a false alarm below 1e-11 a token. bf16 twice the checkpoint's stored noise floor for
    sequences of that length, by token, mean and median, or without one the run's own noise. NaN and infinity are never
    allowed, on neither side. What ranks get back is exact.
    Where to look: the forward if the loaded shards are right: rope, epsilon, scaling, masks, label alignment; and the
    groups over which scores are gathered from the last stage.
    What it does not catch: what no scored token exercises (an expert that none is routed to: WGT001).
    References: Megatron-Bridge#3743, slime#1734, RL#1046, verl#4250, vllm and trl rows of the catalogue.
    """
    yield from compare_with_oracle(trace, TrainerLogprobs, OracleLogprobs, "the trainer", third=EngineLogprobs)
    first: dict[tuple[str, int], ReturnedLogprobs] = {}
    for item in trace.of(ReturnedLogprobs):  # each rank goes on with what it got, not with what rank 0 did
        expected = first.setdefault((item.name, item.version), item)
        if expected is not item:
            sentence = f"{owner_of(item)} got other log-probabilities than the first rank"
            what, sides = f"{item.name} on rank {item.rank}", (item.digest, expected.digest)
            yield compare_value(item, what, *sides, sentence=sentence, allowed="exact (they are copied)")


def repeated_tokens(trace: Trace, scoring: Record, lengths: Sequence[int]) -> np.ndarray:
    """[N] int64, a number for each scored token, from 0; those behind the same tokens have the same one.

    All differ where nobody says which tokens they are.

    Args:
        trace: holds the tokens, under the name and version of the scoring.
        scoring: of the tokens.
        lengths: scored tokens of each sequence, which are its last ones.
    """
    sequences = _sequences(trace, scoring)
    if len(sequences) != len(lengths) or any(map(int.__lt__, map(len, sequences), lengths)):
        return np.arange(sum(lengths))
    numbers: dict[tuple[int, int], int] = {}
    places: list[int] = []
    for tokens, length in zip(sequences, lengths, strict=True):
        number, path = -1, []
        for token in tokens:
            number = numbers.setdefault((number, token), len(numbers))
            path.append(number)
        places += path[len(path) - length :]
    return np.unique(np.array(places, np.int64), return_inverse=True)[1]


def tokens_apart(scoring: Record, lengths: Sequence[int]) -> int:
    """Number of tokens whose noise scatters by itself: of samples of one prompt, those of the longest.

    A router that flips within a prompt moves what comes after it in each of its samples. All tokens if the scoring is
    not of samples.
    """
    if not isinstance(scoring, SampledTokens):
        return sum(lengths)
    longest: dict[tuple[int, ...], int] = {}
    for prompt, length in zip(scoring.prompts, lengths, strict=True):
        longest[tuple(prompt)] = max(longest.get(tuple(prompt), 0), length)
    return sum(longest.values())


def counted_once(values: np.ndarray, numbers: np.ndarray) -> np.ndarray:
    """Mean value of each different token: a repeated one says nothing new of how far they scatter."""
    return np.bincount(numbers, values) / np.bincount(numbers)


def _sequences(trace: Trace, scoring: Record) -> list[list[int]]:
    """Tokens of what was scored or sampled under a name and version; none where nobody says."""
    for sampled in trace.of(SampledTokens, name=scoring.name, version=scoring.version):
        both = zip(sampled.prompts, sampled.tokens, strict=True)
        return [[*prompt, *tokens] for prompt, tokens in both]
    for item in trace.of(Rollouts, name=scoring.name, version=scoring.version):
        return [part.tolist() for part in ragged.split(trace.arrays(item)["tokens"], item.lengths)]
    return []
