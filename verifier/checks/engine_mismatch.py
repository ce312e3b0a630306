"""Trainer against engine at every step of training: log-probabilities of the tokens that are trained."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from verifier.checks.content import times
from verifier.checks.logprobs import FEW_TOKENS, GREATEST_NOISES, NOISES, at_temperature
from verifier.core.check import check
from verifier.core.comparison import Comparison, Tolerance, slope_of
from verifier.core.records_policy import LossTerms, PolicyColumns
from verifier.core.records_tokens import SampledNoise
from verifier.core.stage import Stage
from verifier.core.trace import Trace

MISMATCH = Tolerance(
    absolute=1e-4, unit="nats",
    source="fp32 on CPU: 2.4e-5 was measured over 114,000 tokens of a run; weights of one step before differ by 1 nat",
)  # fmt: skip
MOST = Tolerance(absolute=1e-5, unit="nats", source="fp32 on CPU: 1.6e-6 was measured over each of 114 steps of a run")
FEW = 10
"""Tokens of which no tenth can be told."""
SHARE = 0.9
"""Share of a step's tokens that `MOST` speaks of."""
LEAST_UNSURE = 1e-4
"""Least 1 - p that noise is held against: below it rounding of float32 has a part."""
ERRORS = 3
"""Standard errors that a mean of magnitudes may be off by, as those of LGP001."""
SIGNED_ERRORS = 5
"""Standard errors that a signed mean or a slope may be off by: chance exceeds them less than once in a million."""


@dataclass(frozen=True, slots=True)
class _Token:
    """One token on both sides."""

    rollout: str
    place: int
    old: float
    engine: float
    claimed: int

    @property
    def gap(self) -> float:
        """Magnitude of the difference, nats."""
        return abs(self.old - self.engine)


@dataclass(frozen=True, slots=True)
class _Statistic:
    """A statistic of all tokens of a step, and what it may be."""

    name: str
    value: float
    bound: Tolerance
    unit: str
    hint: str


@check("LGP009", needs=(PolicyColumns,), scope="mismatch")
def engine_logprob_differs_from_trainer(trace: Trace) -> Iterator[Comparison]:
    """The engine's log-probability of every token that it sampled is the trainer's for the same weights.

    What it checks: per rollout in the loss, each token that the very weights sampled which are about to be trained:
    `engine` against `old`, both at the run's temperature. Over all such tokens of the step: in fp32 nine tenths of
    them; in bf16 the mean and the root mean square of magnitudes, the signed mean, and the slope over log-probability.
    Why it matters: a mismatch is a sync that went wrong, a cache of old weights, another temperature or another model;
    an importance weight hides it, and the reward stops rising.
    Evidence: advantage/policy ("engine", "old", "version"); in bf16 logprob/sampled-noise, which sampled steps
    (`verify.every`) measure and later steps keep.
    Tolerance and its source: fp32 1e-4 nats for each token, 1e-5 for nine tenths of them; measured on a clean run
    of 114 steps; divided by a temperature below 1. Rounding grows as weights sharpen, so the bound of one token is
    above that of LGP001. In bf16 this run's noise, transformers in bf16 against fp32: both sides may be off by it, so
    twice; a token three times the greatest of all sampled steps so far. A mean has three standard errors more, a signed
    mean and a slope five; a floor of an earlier step has three of its own. Of 100 tokens or more. Noise of a
    log-probability grows as 1 - p: less sure tokens than the floor's may be off by so much more.
    What it does not catch: both sides wrong alike (LGP001), tokens of older weights (LGP003, on sampled steps), tokens
    that read keys and values of older weights (`grpo.keep_kv_cache`); in bf16 steps before the first sampled one, and
    single tokens of a mixture, whose routers flip, or beside a floor of fewer than 100 tokens.
    References: NeMo-RL#4018, SkyRL#979, verl#7495, NeMo-RL#2100.
    """
    exact = trace.manifest.dtype == "float32"
    for item in trace.of(PolicyColumns):
        noise = None if exact else next(trace.of(SampledNoise, version=item.version), None)
        if not exact and noise is None:
            raise LookupError(f"no measured noise of {trace.manifest.dtype} for step {item.version}")
        temperature = next((terms.temperature for terms in trace.of(LossTerms, version=item.version)), 1.0)
        seen: list[_Token] = []
        for tokens in _fresh(trace, item):
            seen += tokens
            worst, bound = _worst(tokens, noise, temperature)
            yield Comparison(
                what=worst.rollout, same=math.isfinite(worst.gap) and worst.gap <= bound.absolute,
                stage=Stage.ROLLOUT, version=item.version, badness=times(worst.gap, bound.absolute), owner="engine",
                sentence=f"token {worst.place} of `{worst.rollout}` has {worst.engine:.6g} nats in the engine and "
                f"{worst.old:.6g} in the trainer",
                expected=f"{worst.old:.6g} (the trainer, version {item.trained_version})",
                actual=f"{worst.engine:.6g} (the engine, which says version {worst.claimed})",
                allowed=str(bound), hint="look at the last sync, the prefix cache and the temperature",
            )  # fmt: skip
        if noise is not None:
            yield from _compare_statistics(item, seen, noise)
        elif len(seen) >= FEW:
            yield _most(item, seen, at_temperature(MOST, temperature))


def _fresh(trace: Trace, item: PolicyColumns) -> Iterator[list[_Token]]:
    """Tokens of each rollout in the loss that the trained version sampled; no rollout without any."""
    ends = np.cumsum(item.lengths)[:-1]
    arrays = {name: np.split(trace.array(item, name), ends) for name in ("old", "engine", "mask", "version")}
    for place, name in enumerate(item.ids):
        old, engine, mask, version = (arrays[key][place] for key in ("old", "engine", "mask", "version"))
        if item.keep_kv_cache and version[version >= 0][0] != item.trained_version:
            continue  # its later tokens read keys and values of the weights that came first
        fresh = np.flatnonzero(mask.astype(bool) & (version == item.trained_version)).tolist()
        if fresh:
            yield [_Token(name, at, float(old[at]), float(engine[at]), int(version[at])) for at in fresh]


def _worst(tokens: list[_Token], noise: SampledNoise | None, temperature: float) -> tuple[_Token, Tolerance]:
    """Token that is farthest off beside its bound, and that bound."""
    if noise is None:
        bound = at_temperature(MISMATCH, temperature)
        return max(tokens, key=lambda token: token.gap if math.isfinite(token.gap) else math.inf), bound
    shares = [times(token.gap, _greatest(noise, token).absolute) for token in tokens]
    gaps = [token.gap for token in tokens]
    at = max(range(len(tokens)), key=lambda place: (not math.isfinite(gaps[place]), shares[place], gaps[place]))
    return tokens[at], _greatest(noise, tokens[at])


def _most(item: PolicyColumns, seen: list[_Token], bound: Tolerance) -> Comparison:
    most = float(np.quantile([token.gap for token in seen], SHARE))
    return Comparison(
        what=f"{SHARE:.0%} of the tokens", same=most <= bound.absolute, stage=Stage.ROLLOUT, version=item.version,
        badness=times(most, bound.absolute), owner="engine",
        sentence=f"one token in ten differs by {most:.3g} nats or more between engine and trainer",
        expected="the trainer's log-probabilities of the same tokens", actual=f"{most:.3g} nats apart",
        allowed=str(bound), hint="look at the arithmetic of both sides: dtype, epsilon, scale, temperature",
    )  # fmt: skip


def _greatest(noise: SampledNoise, token: _Token) -> Tolerance:
    """Bound on a token; of a mixture, or of a floor of few tokens, a finite one alone.

    Noise of logits changes a log-probability by as much as its token is unsure, 1 - p. So one that is less sure than
    all of the floor's may be off by so much more.
    """
    if noise.routed:
        return Tolerance(absolute=math.inf, unit="nats", source="routers flip, so any finite one")
    if noise.tokens < FEW_TOKENS:
        return Tolerance(
            absolute=math.inf, unit="nats", source=f"{noise.tokens} tokens are no floor, so any finite one"
        )
    greatest, source = float(noise.greatest), f"{GREATEST_NOISES} x {_source(noise)}"
    more = float(_unsure(np.array(token.old))) / max(float(noise.most_unsure), LEAST_UNSURE)
    if more > 1:
        greatest, source = greatest * more, f"{source}{_surer(more)}"
    if greatest < float(noise.greatest_of_run):
        greatest, source = float(noise.greatest_of_run), f"{source}; the greatest of the run so far"
    return Tolerance(absolute=GREATEST_NOISES * greatest, unit="nats", source=source)


def _unsure(old: np.ndarray) -> np.ndarray:
    """1 - p by the trainer: the share of what a token's logit is off by that its log-probability is off by."""
    share: np.ndarray = -np.expm1(np.minimum(old, 0.0))
    return share


def _surer(more: float) -> str:
    """Clause of a floor's source where its tokens are surer than those that it is held against."""
    return f", which are {more:.3g} times as sure" if more > 1.005 else ""


def _source(noise: SampledNoise) -> str:
    return f"this run's noise: its dtype against fp32, {noise.tokens:,} tokens of version {noise.measured}"


def _compare_statistics(item: PolicyColumns, seen: list[_Token], noise: SampledNoise) -> Iterator[Comparison]:
    if len(seen) < FEW_TOKENS or noise.tokens < FEW_TOKENS or not all(math.isfinite(token.gap) for token in seen):
        return
    for found in _statistics(item, seen, noise):
        yield Comparison(
            what=found.name, same=found.value <= found.bound.absolute, stage=Stage.ROLLOUT, version=item.version,
            badness=times(found.value, found.bound.absolute), owner="engine",
            sentence=f"the {found.name} of what engine and trainer differ by is {found.value:.3g} {found.unit} over "
            f"{len(seen):,} tokens, {found.bound.absolute:.3g} is allowed",
            expected="the trainer's log-probabilities of the same tokens", actual=f"{found.value:.3g} {found.unit}",
            allowed=str(found.bound), hint=found.hint,
        )  # fmt: skip


def _statistics(item: PolicyColumns, seen: list[_Token], noise: SampledNoise) -> Iterator[_Statistic]:
    """Statistics of a step with their bounds; `_Statistic.value` is a magnitude."""
    old, engine = np.array([token.old for token in seen]), np.array([token.engine for token in seen])
    gaps, root = old - engine, math.sqrt(len(seen))
    source, carried = _source(noise), noise.measured != item.trained_version
    for name, values, mean, deviation in (
        ("mean magnitude", np.abs(gaps), noise.mean, noise.deviation),
        ("root mean square", gaps**2, noise.squares, noise.squares_deviation),
    ):
        square = name == "root mean square"
        if square and noise.routed:
            continue
        times_noise = NOISES**2 if square else NOISES
        shares = _unsure(old)
        own, known = ((shares**2).mean(), noise.unsure_squares) if square else (shares.mean(), noise.unsure)
        more = max(1.0, float(own) / max(float(known), LEAST_UNSURE ** (2 if square else 1)))
        floor = float(mean) + (ERRORS * float(deviation) / math.sqrt(noise.tokens) if carried else 0.0)
        bound = times_noise * more * floor + ERRORS * max(float(values.std()), float(deviation)) / root
        value = float(values.mean())
        if square:
            value, bound = math.sqrt(value), math.sqrt(bound)
        yield _Statistic(
            name, value,
            Tolerance(
                absolute=bound, unit="nats", source=f"{NOISES} times, and standard errors; {source}{_surer(more)}"
            ), "nats",
            "look at the last sync, and at the arithmetic of both sides: dtype, epsilon, scale",
        )  # fmt: skip
    error = max(float(gaps.std()), math.sqrt(float(noise.squares))) / root
    bound = NOISES * abs(float(noise.bias)) + SIGNED_ERRORS * error
    yield _Statistic(
        "signed mean", abs(float(gaps.mean())),
        Tolerance(absolute=bound, unit="nats", source=f"{NOISES} times, and {SIGNED_ERRORS} standard errors; {source}"),
        "nats", "look at what the engine adds to each: truncation, penalties, a bias of the logits",
    )  # fmt: skip
    slope, error = slope_of(gaps, (old + engine) / 2)
    bound = NOISES * abs(float(noise.slope)) + SIGNED_ERRORS * max(error, float(noise.slope_error))
    yield _Statistic(
        "slope over log-probability", abs(slope),
        Tolerance(
            absolute=bound, unit="nats per nat",
            source=f"{NOISES} times, and {SIGNED_ERRORS} standard errors; {source}",
        ),
        "nats per nat", "look at what scales logits: temperature, the final norm, the head",
    )  # fmt: skip
