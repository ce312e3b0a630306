"""Answers of an evaluation: the policy that gave them, and whether they are greedy where they should be."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from verifier.core import ragged
from verifier.core.check import At, Comparison, Stage, Tolerance, Trace, check, compare_value
from verifier.core.condition import on, recorded
from verifier.knob import flat
from verifier.stages.checks_conditions import EXAMINED, NOISE
from verifier.stages.data.checks_answer_ends import spans, wrong_end
from verifier.stages.data.checks_handed_on import adapters_named, compare_evaluated
from verifier.stages.logprob.records import SampledNoise
from verifier.stages.rollout.checks_draws import SEEDS, compare_knobs
from verifier.stages.rollout.checks_engine_mismatch import MEASURED, bound_in_fp32, compare_beyond
from verifier.stages.rollout.records import EvaluatedAnswers
from verifier.stages.train.records import PreviousStep

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
            yield _ended(item, name, tokens, mask)
            engine, trainer, below = (value[at].astype(np.float64) for value in values)
            if not (exact or noise) and np.isfinite(engine).all():  # that is wrong in any dtype
                continue
            if noise is not None:
                far += [(np.abs(engine - trainer), trainer)]
                far_below += [(below / SIDES, trainer)] if greedy else []
                continue
            bound = bound_in_fp32(trace, item.version + 1, 1.0 if greedy else item.temperature)
            yield _worst(item, name, at, (engine, trainer), bound)
            if greedy and exact:
                yield _greedy(item, name, at, below, bound)
        for tokens_of, parts in (("the evaluation", far), ("greedy answers, below the likeliest", far_below)):
            if noise is not None and parts:
                gaps, values = (np.concatenate(part) for part in zip(*parts, strict=True))
                where = At(Stage.ROLLOUT, item.version, "engine")
                yield compare_beyond(where, np.where(np.isfinite(gaps), gaps, np.inf), values, noise, tokens_of)


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
        words = f"{'one each of' if turn else 'all of'} {begin:,} to {begin + count - 1:,}, in order"
        ends = min(seeds, default=0), max(seeds, default=0)
        found = f"{len(set(seeds)):,} seeds of {len(seeds):,} answers, {ends[0]:,} to {ends[1]:,}"
        at, what = At(Stage.ROLLOUT, item.version, "engine"), f"seeds of the evaluation, turn {turn}"
        yield compare_value(at, what, found, words, same=same)


def _farthest(values: np.ndarray) -> int:
    """Place of the greatest value; one that is not finite before others."""
    return int(np.argmax(np.where(np.isfinite(values), values, np.inf)))


def _worst(
    item: EvaluatedAnswers, name: str, at: np.ndarray, sides: tuple[np.ndarray, np.ndarray], bound: Tolerance
) -> Comparison:
    engine, trainer = sides
    place = _farthest(np.abs(engine - trainer))
    subject = f"the evaluation's log-probability of token {at[place]} of `{name}`"
    says, where = ("the engine", "the trainer"), At(Stage.ROLLOUT, item.version, "engine")
    left, right = float(engine[place]), float(trainer[place])
    return compare_value(where, name, left, right, subject=subject, says=says, allowed=bound)


def _ended(item: EvaluatedAnswers, name: str, tokens: np.ndarray, mask: np.ndarray) -> Comparison:
    turns = [tokens[begin:end].tolist() for begin, end in spans(mask.astype(bool))]
    ends, most = (item.end, *item.other_ends), item.max_answer_tokens
    said = [wrong_end(turn, most, ends, is_last=turn is turns[-1]) for turn in turns]
    wrong = next((words for words in said if words), "")
    found = ", ".join(f"{len(turn):,} tokens, the last is {turn[-1]}" for turn in turns[-2:])
    right, sentence = f"up to the first token {item.end}, or {most:,}", f"the answer `{name}` of the evaluation {wrong}"
    where = At(Stage.ROLLOUT, item.version, "engine")
    return compare_value(where, f"{name}, its end", found, right, same=not wrong, sentence=sentence)


def _greedy(item: EvaluatedAnswers, name: str, at: np.ndarray, below: np.ndarray, bound: Tolerance) -> Comparison:
    place = _farthest(below)
    subject = f"the nats of token {at[place]} of `{name}` below the likeliest one, which a greedy answer has,"
    allowed, where = replace(bound, absolute=SIDES * bound.absolute), At(Stage.ROLLOUT, item.version, "engine")
    short = float(below[place])
    return compare_value(where, f"{name}, greedy", short, None, subject=subject, allowed=allowed)
