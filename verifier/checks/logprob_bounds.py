"""Bounds on the distance of log-probabilities from the fp32 oracle's: fixed, by a stored floor or the run's noise."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from verifier.core import ragged
from verifier.core.check import Stage, Tolerance, Trace
from verifier.core.records_tokens import ROUNDINGS, DtypeNoise, EngineNoise, GivenRoutes, NoiseRecord, StoredFloor

FP32 = Tolerance(absolute=1e-5, unit="nats", source="fp32: ten times the scale of rounding in tiny models")
"""Least that is allowed in fp32: what is below it is asked of nobody."""
FEW_TOKENS = 100
"""Below this many tokens a mean says less than the greatest difference does, and is not judged."""
NOISES = 2
"""Times all other noises that are allowed: a stored floor's, the greatest of a whole run, and the mean of one set."""
GREATEST_NOISES = 3
"""Times the greatest noise of one set that a token may differ by: it is the greatest of a few hundred at most."""
CHANCE = 1e-12
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
    return math.ceil(math.log(CHANCE) / math.log(tokens / (tokens + others)))


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

    A mean of few scatters, so it gets three standard errors more, and so does a median: that of an exponential
    distribution scatters as its mean does, that of one with heavier tails less. There is none on upper quantiles, where
    a mixture's router begins to flip: on clean runs the 0.9 quantile was 0.3 to 2.2 times the floor's.
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
