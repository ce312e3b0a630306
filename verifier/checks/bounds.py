"""Bounds on differences of log-probabilities: fixed or the run's noise in fp32, noise in bf16."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from verifier.core.comparison import Tolerance
from verifier.core.records_logprobs import DtypeNoise, EngineNoise, NoiseRecord, StoredFloor
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
"""Times all other noises that are allowed: a stored floor's, and the mean of a run's own."""
GREATEST_NOISES = 3
"""Times the run's own greatest noise that a token may differ by: it is the greatest of a few hundred."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Allowed absolute differences, nats."""

    greatest: tuple[Tolerance, ...]
    """Bound on any token, per sequence."""
    body: Mapping[str, Tolerance] = field(default_factory=dict)
    """Bound on a statistic over all tokens, "mean" or "median"."""


def bounds_of(
    trace: Trace, stage: Stage, name: str, version: int, lengths: Sequence[int], whole: Sequence[int] = ()
) -> Bounds:
    """Return what one scoring may differ from the oracle by.

    Args:
        trace: of the run.
        stage: of the actual side.
        name: of the scoring.
        version: weight version.
        lengths: log-probabilities of each sequence.
        whole: tokens of each sequence, with those before the first scored one; unknown where empty.

    In fp32 they are fixed, for checkpoints that are no coarser than those the bound was measured on; the run has
    measured the others: transformers in fp32 against itself in float64, at version 0.

    In bf16 they are twice the stored noise floor of sequences of that length, where the run's checkpoint has one;
    otherwise they come from the run: transformers in bf16 against transformers in fp32, on the same tokens and weights.
    Of an engine that quantizes its weights they come from that engine at version 0, where it is a cold one, by its
    start or by ENG002; at version 0 itself they say nothing.

    Raises:
        LookupError: a bf16 run without a floor has not measured its noise.
    """
    if trace.manifest.dtype == "float32":
        return Bounds(greatest=(_fp32(trace, name),) * len(lengths))
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
    body = {}
    if sum(lengths) >= FEW_TOKENS:
        for statistic in ("mean", "median") if floors else ("mean",):
            noisiest = max(noises, key=lambda noise: float(getattr(noise, statistic)))
            body[statistic] = _bound(noisiest, statistic, sum(lengths))
    return Bounds(greatest=tuple(_bound(noise, "greatest") for noise in noises), body=body)


def times(value: float, allowed: float) -> float:
    """Return the ratio to what is allowed; infinite where nothing is, or where the value is not finite."""
    return value / allowed if allowed and math.isfinite(value) else math.inf


def _fp32(trace: Trace, name: str) -> Tolerance:
    noises = [float(item.greatest) for item in trace.of(DtypeNoise, version=0) if item.name in (name, "scored")]
    bound = FP32_NOISES * max(noises, default=0.0)
    source = f"this run's noise: transformers in fp32 against itself in float64, times {FP32_NOISES}"
    return FP32 if bound <= FP32.absolute else Tolerance(absolute=bound, unit=FP32.unit, source=source)


def _floors(trace: Trace, whole: Sequence[int]) -> list[StoredFloor]:
    """Per sequence, the floor of its length; none at all if a sequence is longer than every bucket."""
    buckets = sorted(trace.of(StoredFloor), key=lambda floor: floor.longest)
    if not buckets or max(whole, default=0) > buckets[-1].longest:
        return []
    return [next(floor for floor in buckets if length <= floor.longest) for length in whole]


def _bound(noise: NoiseRecord, statistic: str, num_tokens: int = 0) -> Tolerance:
    """Bound on the greatest of a sequence, or on the mean or the median of all tokens.

    A mean of few scatters, so it gets three standard errors more. Measured on a DeepSeek-V3 with 16 experts, whose
    router flips in bf16: 0.06 nats on the mean of 262 tokens, and 0.18 on that of 8 sampled ones of the same weights;
    so a mean of few is not judged at all.

    There is none on upper quantiles, which lie where a mixture's router begins to flip: on clean runs of 262 tokens
    nine tenths lay between 0.3 and 2.2 times the floor's, the median between 0.6 and 1.3 times.
    """
    allowed = NOISES if statistic != "greatest" or isinstance(noise, StoredFloor) else GREATEST_NOISES
    bound, more = allowed * float(getattr(noise, statistic)), ""
    if statistic == "mean":
        bound, more = bound + 3 * float(noise.deviation) / math.sqrt(num_tokens), " and three standard errors"
    if isinstance(noise, StoredFloor):
        floor = f"the {statistic} of the noise floor for up to {noise.longest:,} tokens"
        source = f"{allowed} x {floor}{more}, {noise.stored}"
    else:
        by = "the quantized engine, cold," if isinstance(noise, EngineNoise) else "transformers in the run's dtype"
        source = f"this run's noise: {by} against transformers in fp32, times {allowed}{more}"
    return Tolerance(absolute=bound, unit="nats", source=source)
