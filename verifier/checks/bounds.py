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
FLOORS = 2
"""Noise floors that are allowed."""
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
    if stage is Stage.ROLLOUT:
        for own in trace.of(EngineNoise, version=version, name=name):
            return _by_noise(own, lengths, "the quantized engine, cold,")
    floors = _floors(trace, whole)
    if floors and stage is not Stage.REPLAY:  # a floor is of routers that flip; those that are told do not
        return _by_floors(floors, lengths)
    for noise in trace.of(DtypeNoise, version=version, name=name):
        return _by_noise(noise, lengths, "transformers in the run's dtype")
    raise LookupError(f"no measured noise of `{name}` for version {version}")


def _fp32(trace: Trace, name: str) -> Tolerance:
    measured = trace.of(DtypeNoise, version=0)
    noises = [float(item.greatest) for item in measured if item.name in (name, "scored")]
    bound = FP32_NOISES * max(noises, default=0.0)
    if bound <= FP32.absolute:
        return FP32
    source = f"this run's noise: transformers in fp32 against itself in float64, times {FP32_NOISES}"
    return Tolerance(absolute=bound, unit=FP32.unit, source=source)


def _by_noise(noise: NoiseRecord, lengths: Sequence[int], measured_on: str) -> Bounds:
    """Three times the greatest of a token; twice the mean and three standard errors, since a mean of few scatters.

    Measured on a DeepSeek-V3 with 16 experts, whose router flips in bf16: 0.06 nats on the mean of 262 tokens, and 0.18
    on that of 8 sampled ones of the same weights; so a mean of few is not judged at all.
    """
    source = f"this run's noise: {measured_on} against transformers in fp32, times {{}}"
    greatest = Tolerance(
        absolute=GREATEST_NOISES * float(noise.greatest), unit="nats", source=source.format(GREATEST_NOISES)
    )
    body = {}
    if sum(lengths) >= FEW_TOKENS:
        mean = 2 * float(noise.mean) + _three_errors(noise, sum(lengths))
        body["mean"] = Tolerance(absolute=mean, unit="nats", source=source.format("2 and three standard errors"))
    return Bounds(greatest=(greatest,) * len(lengths), body=body)


def _floors(trace: Trace, whole: Sequence[int]) -> list[StoredFloor]:
    """Per sequence, the floor of its length; none at all if a sequence is longer than every bucket."""
    buckets = sorted(trace.of(StoredFloor), key=lambda floor: floor.longest)
    if not buckets or max(whole, default=0) > buckets[-1].longest:
        return []
    return [next(floor for floor in buckets if length <= floor.longest) for length in whole]


def _by_floors(floors: list[StoredFloor], lengths: Sequence[int]) -> Bounds:
    """Twice the floor: of a token its greatest, of all tokens its mean and its median.

    Not of upper quantiles, which lie where a mixture's router begins to flip: on clean runs of 262 tokens nine tenths
    lay between 0.3 and 2.2 times the floor's, the median between 0.6 and 1.3 times.
    """

    def twice(value: float, of: str, floor: StoredFloor, more: str = "") -> Tolerance:
        source = f"{FLOORS} x the {of} of the noise floor for up to {floor.longest:,} tokens{more}, {floor.stored}"
        return Tolerance(absolute=value, unit="nats", source=source)

    greatest = tuple(twice(FLOORS * float(floor.greatest), "greatest", floor) for floor in floors)
    body = {}
    if sum(lengths) >= FEW_TOKENS:
        for name in ("mean", "median"):
            values = [float(getattr(floor, name)) for floor in floors]
            floor, bound, more = floors[values.index(max(values))], FLOORS * max(values), ""
            if name == "mean":
                bound, more = bound + _three_errors(floor, sum(lengths)), " and three standard errors"
            body[name] = twice(bound, name, floor, more)
    return Bounds(greatest=greatest, body=body)


def _three_errors(noise: NoiseRecord, num_tokens: int) -> float:
    return 3 * float(noise.deviation) / math.sqrt(num_tokens)
