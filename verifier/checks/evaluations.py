"""Answers of an evaluation: the policy that gave them, and whether they are greedy where they should be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from verifier.checks.answer_ends import spans, wrong_end
from verifier.checks.conditions import EXAMINED, NOISE
from verifier.checks.content import times
from verifier.checks.draws import SEEDS
from verifier.checks.engine_mismatch import MEASURED, bound_in_fp32, greatest_nats, noise_source
from verifier.checks.logprob_bounds import FEW_TOKENS, GREATEST_NOISES
from verifier.checks.named_weights import adapters_named, compare_evaluated
from verifier.checks.request_knobs import compare_knobs
from verifier.core import ragged
from verifier.core.check import check
from verifier.core.comparison import Comparison, Tolerance
from verifier.core.condition import on, recorded
from verifier.core.records_policy import EvaluatedAnswers
from verifier.core.records_tokens import SampledNoise
from verifier.core.records_trainer import PreviousStep
from verifier.core.stage import Stage
from verifier.core.trace import Trace
from verifier.knob import flat

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
    and the greedy one: the version that the metrics name against that of the live weights; token by token, the
    engine's log-probability against the trainer's, which scores them by these weights before they move; of greedy
    answers, how far each token's logit is below the greatest one in the trainer. And that each turn has its end token
    at its last place alone, and otherwise as many tokens as the config allows (DAT008 says this of a step's answers).
    Of all answers, that the engines' processes asked their library for that temperature, or for 0, and for nothing else
    that changes a distribution: no truncation, penalty, bias or least length; and for the adapter of that version, or
    that they held the weights of that version. And of all answers that are not greedy, the seeds that these processes
    named, against the closed form by (seed, version, turn, place): each has its own.
    Why it matters: an evaluation before the sync shows the step before, one that draws where it should be greedy, or
    at another temperature, shows another policy; one with a limit of its own, or without a stop token, shows answers
    that training never has. Curves and the choice of a checkpoint rest on it.
    Evidence: rollout/evaluated; in less than float32 logprob/sampled-noise.
    Tolerance and its source: as LGP009, for one token; of greedy answers, twice that below the greatest logit. Knobs,
    seeds, versions and ends are exact.
    What it does not catch: rewards of the answers; in less than float32 without a measured noise, of which the report
    tells, log-probabilities and greediness; of answers that were not kept all but knobs, seeds and weights; an
    evaluation whose run was stopped before the next trace; quantized engines; after the last step, a run in bf16 or
    with a sleeping engine.
    References: LLMs-Finetuning-Safety#7, NLPDL-2025Fall#31, RLPR#25, slime#2242, miles#2075, AReaL#1524.
    """
    for item in trace.of(EvaluatedAnswers):
        yield Comparison(
            what="version", same=item.claimed == item.version, stage=Stage.ROLLOUT, version=item.version, badness=1.0,
            sentence=f"an evaluation names version {item.claimed}, and the trainer holds version {item.version}",
            expected=f"version {item.version} (the live weights)", actual=f"version {item.claimed} (the metrics)",
            allowed="exact", hint="look at what labels the metrics of an evaluation",
        )  # fmt: skip
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
        for name, greedy, mask, tokens, *values in zip(item.ids, item.greedy, *columns, strict=True):
            at = np.flatnonzero(mask)
            if not len(at):
                continue
            yield _ended(item, name, tokens, mask)
            engine, trainer, below = (value[at].astype(np.float64) for value in values)
            if not (exact or noise) and np.isfinite(engine).all():  # that is wrong in any dtype
                continue
            own = bound_in_fp32(trace, item.version + 1, 1.0 if greedy else item.temperature)
            bounds = (
                np.full(len(at), own.absolute) if noise is None else GREATEST_NOISES * greatest_nats(noise, trainer)
            )
            said = _said(noise) if noise is not None else own
            yield _worst(item, name, at, (engine, trainer), bounds, said)
            if greedy and (exact or noise):
                yield _greedy(item, name, at, below, bounds, said)


def _seeds(item: EvaluatedAnswers, config: Mapping[str, Any]) -> Iterator[Comparison]:
    """Seeds of the answers that are not greedy, of traces and configs that have them."""
    if not item.seeds or "seed" not in config or "grpo.max_turns" not in config:
        return
    count = len(item.seeds[0])
    first = (int(config["seed"]) + 1) * SEEDS - (item.claimed + 1) * int(config["grpo.max_turns"]) * count
    for turn, seeds in enumerate(item.seeds):
        begin = first + turn * count
        right = [*range(begin, begin + count)]
        rises = all(before < after for before, after in pairwise(seeds))
        same = [*seeds] == right if not turn else rises and set(seeds) <= set(right)  # later, of those that go on
        yield Comparison(
            what=f"seeds of the evaluation, turn {turn}", same=same, stage=Stage.ROLLOUT, version=item.version,
            badness=1.0, owner="engine",
            sentence=f"{len(seeds):,} answers of the evaluation have {len(set(seeds)):,} seeds, from "
            f"{min(seeds, default=0):,} to {max(seeds, default=0):,}",
            expected=f"{'one each of' if turn else 'all of'} {begin:,} to {begin + count - 1:,}, in order",
            actual=f"{seeds[0] if seeds else 0:,} first", allowed="exact (seeds)",
            hint="look at what the seed of each request of an evaluation is made of",
        )  # fmt: skip


def _said(noise: SampledNoise) -> Tolerance:
    """Bound of a token whose nats are still to be put in."""
    few = noise.routed or noise.tokens < FEW_TOKENS
    source = "no floor, so any finite one" if few else f"{GREATEST_NOISES} x {noise_source(noise)}"
    return Tolerance(absolute=0.0, unit="nats", source=source)


def _farthest(values: np.ndarray, bounds: np.ndarray) -> int:
    """Place of the value that is farthest off beside its bound; one that is not finite before others."""
    finite = np.isfinite(values)
    return int(np.argmax(np.where(finite, np.where(finite, values, 0.0) / bounds, np.inf)))


def _worst(
    item: EvaluatedAnswers, name: str, at: np.ndarray, sides: tuple[np.ndarray, np.ndarray], bounds: np.ndarray,
    said: Tolerance,
) -> Comparison:  # fmt: skip
    engine, trainer = sides
    gaps = np.abs(engine - trainer)
    place = _farthest(gaps, bounds)
    gap, bound = float(gaps[place]), float(bounds[place])
    return Comparison(
        what=name, same=bool(np.isfinite(gap)) and gap <= bound, stage=Stage.ROLLOUT, version=item.version,
        share=times(gap, bound), owner="engine",
        sentence=f"token {at[place]} of `{name}` has {engine[place]:.6g} nats in the evaluation and "
        f"{trainer[place]:.6g} in the trainer",
        expected=f"{trainer[place]:.6g} (the trainer, version {item.version})",
        actual=f"{engine[place]:.6g} (the engine, which the metrics call version {item.claimed})",
        allowed=str(replace(said, absolute=bound)),
        hint="look at what is synced before an evaluation, and at its temperature",
    )  # fmt: skip


def _ended(item: EvaluatedAnswers, name: str, tokens: np.ndarray, mask: np.ndarray) -> Comparison:
    turns = [tokens[begin:end].tolist() for begin, end in spans(mask.astype(bool))]
    ends, most = (item.end, *item.other_ends), item.max_answer_tokens
    said = [wrong_end(turn, most, ends, is_last=turn is turns[-1]) for turn in turns]
    wrong = next((words for words in said if words), "")
    return Comparison(
        what=f"{name}, its end", same=not wrong, stage=Stage.ROLLOUT, version=item.version, badness=1.0, owner="engine",
        sentence=f"the answer `{name}` of the evaluation {wrong}",
        expected=f"up to the first token {item.end}, or {most:,} tokens",
        actual=", ".join(f"{len(turn):,} tokens, the last is {turn[-1]}" for turn in turns[-2:]), allowed="exact",
        hint="look at which stop tokens and which limit reach the engine with an evaluation",
    )  # fmt: skip


def _greedy(
    item: EvaluatedAnswers, name: str, at: np.ndarray, below: np.ndarray, bounds: np.ndarray,
    said: Tolerance,
) -> Comparison:  # fmt: skip
    place = _farthest(below, bounds)
    short, bound = float(below[place]), SIDES * float(bounds[place])
    return Comparison(
        what=f"{name}, greedy", same=bool(np.isfinite(short)) and short <= bound, stage=Stage.ROLLOUT,
        version=item.version, share=times(short, bound), owner="engine",
        sentence=f"token {at[place]} of `{name}` is {short:.6g} nats less likely than the likeliest one, which a "
        "greedy answer has",
        expected=f"the likeliest token (the trainer, version {item.version})", actual=f"{short:.6g} nats below it",
        allowed=f"{replace(said, absolute=bound)}, for two logits",
        hint="look at how an evaluation is asked to be greedy",
    )  # fmt: skip
