"""Draws of a training step's answers: their seeds, answers that repeat each other, and how likely the tokens are."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

import numpy as np

from verifier.checks.conditions import LIVE
from verifier.checks.named_weights import adapters_named
from verifier.checks.packing import POSITION_BITS
from verifier.checks.request_knobs import compare_knobs
from verifier.core import ragged
from verifier.core.check import At, Comparison, Stage, Trace, check, compare_value
from verifier.core.condition import on, recorded
from verifier.core.records_policy import LossRows, PolicyColumns, RequestSeeds, SamplingAsked
from verifier.core.records_tokens import Rollouts, SampledNoise, SampledTokens
from verifier.core.records_trainer import LossColumns
from verifier.knob import flat

SEEDS = 1_000_003
"""Seeds of a run begin at a multiple of it."""
RARE_NATS = 20.0
"""Log-probability, nats below 0, of the greatest chance that any pair of a step agrees: 2e-9."""
ERRORS = 6.0
"""Deviations that a step's sum may be off by: Delyon's bound on chance is 3e-8."""
FEW_TOKENS = 100
"""Tokens of which no sum is judged."""
NORMALISED = 2e-5
"""Nats that the probabilities of one side may add up to beside 1: float32's log-softmax of 152,000 logits, 1.4e-5 on a
CPU."""
STAKES = 0.5, 0.1
"""Shares of what a bet has that go on each token: small ones lose less where weights have moved far."""
GREATEST_NATS = 500.0
"""Greatest log(p/q) that is counted: exp of more overflows float64."""


@check(
    "LGP011",
    needs=(SamplingAsked, RequestSeeds),
    applies=on(step=LIVE, loop=recorded(SamplingAsked, RequestSeeds, Rollouts, PolicyColumns, SampledTokens)),
)
def answers_drawn_unfairly(trace: Trace) -> Iterator[Comparison]:
    """Every answer of a step is a draw of its own from the policy at the run's temperature.

    What it checks: the seeds that the processes of the engines gave the answers, against the closed form by (seed,
    step, round, turn, place), and that no two of a step are equal; that they asked their library for the run's
    temperature, and for nothing else that changes a distribution: no truncation, penalty, bias or least length; and,
    where the engine gets adapters, for that of the version that their tokens claim, by its name. Two answers of a group
    with the same tokens, unless that is likely: less than e^-20 over all pairs of the step. Over all tokens in the loss
    of the first update that the trained version sampled, the sum of what their log-probability, negated, is above the
    entropy of the trainer's distribution there: 0 on average, whatever was sampled before. Over all sampled tokens, of
    whatever weights, and over those of each rollout: the product of 1 - s + s p/q, where p is the trainer's probability
    of a token and q the one that the engine reported, for a stake s of a half and of a tenth. If a token was drawn by
    q, p/q is 1 on average.
    Why it matters: the same seeds in every step, in a group, or on two engines, train on fewer answers than it seems.
    An engine that samples greedily, from the likeliest tokens alone, or at another temperature, and reports
    log-probabilities of the full distribution, agrees with the trainer on every token that it was asked about.
    Evidence: data/asked (as the config asks), data/seeds, pack/rollouts, loss/rows, advantage/columns,
    advantage/policy; in bf16 logprob/sampled-noise.
    Tolerance and its source: exact seeds and knobs. For the sum six times the root of a third of the sum of squares and
    two thirds of the greatest variance that a log-probability can have at that entropy (Delyon 2009), and in bf16 what
    this run's noise can change. Of 100 tokens or more. For the product e^20, of a rollout times their number: chance
    exceeds it in 2e-9 of steps (Ville 1939). Float32 adds 2e-5 nats a token.
    Where to look: what the seed of each request and of each of its samples is made of.
    What it does not catch: what vLLM makes of a seed and of knobs that its process was given for a request, beyond what
    the sum shows; draws of one request that depend on each other (LGP004, in round trips); samples of an evaluation
    (LGP015). The sum is not judged in a step whose answers leave the loss or are replaced for what was sampled
    (filters, further rounds), by a quantized engine, or in bf16 without a measured noise. The product shows a report
    that is wrong where the trainer is nearer to the truth, in any dtype, and no trainer that is wrong; of a step with
    filters or further rounds it is not judged.
    References: verl#6857, trl#7040, RL#3497, vime#6, verl#5179, verl#7270, miles#2075, vllm#48352.
    """
    for asked in trace.of(SamplingAsked):
        yield from _seeds(trace, asked)
        adapters = adapters_named(trace, _claimed(trace, asked), asked.sent)
        for item in trace.of(RequestSeeds, version=asked.version):
            answers = f"answers of {item.name}"
            yield from compare_knobs(
                f"of {item.name}", answers, asked.temperature, item.shaped, asked.version, adapters
            )
        yield from _repeats(trace, asked)
        if not asked.filtered and not asked.quantized and asked.vocab_size > 2:
            yield from _fair(trace, asked)
        if not asked.filtered:
            yield from _reported(trace, asked)


def _claimed(trace: Trace, asked: SamplingAsked) -> set[int]:
    """Versions that the sampled tokens of a step claim; where it kept none, all that may have sampled them."""
    versions = [trace.array(item, "versions") for item in trace.of(Rollouts, version=asked.version)]
    found = {int(each) for own in versions for each in np.unique(own) if each >= 0}
    if found:
        return found
    ahead = flat(trace.manifest.config).get("grpo.mode", "sync") != "sync"
    return {asked.version - 1, max(asked.version - 2, 0)} if ahead else {asked.version - 1}


def _seeds(trace: Trace, asked: SamplingAsked) -> Iterator[Comparison]:
    seen: dict[int, tuple[int, int, int]] = {}
    for item in trace.of(RequestSeeds, version=asked.version):
        place = ((asked.version - 1) * asked.max_rounds + item.round) * asked.max_turns * asked.batch_size
        for turn, seeds in enumerate(item.turns):
            begin = ((asked.seed or 0) * SEEDS + place + turn * asked.batch_size) * asked.group_size
            where = f"seeds of {item.name}" + (f", turn {turn}" if turn else "")
            right = [*range(begin, begin + len(seeds))] if not turn else None
            wrong = next((at for at, seed in enumerate(seeds) if right and seed != right[at]), None)
            if asked.seed is None:  # a recorded loop's, of which nobody knows more than that each is another
                begin, wrong = min(seeds, default=0), None
            elif right is None:  # those that go on, in order
                end = begin + asked.batch_size * asked.group_size
                falls = [at for at, seed in enumerate(seeds) if at and seed <= seeds[at - 1]]
                wrong = next((at for at, seed in enumerate(seeds) if not begin <= seed < end), next(iter(falls), None))
            own = [(item.round, turn, at) for at in range(len(seeds))]
            firsts = [seen.setdefault(seed, mine) for seed, mine in zip(seeds, own, strict=True)]
            again = next((at for at, (first, mine) in enumerate(zip(firsts, own, strict=True)) if first != mine), None)
            bad = wrong if again is None else again
            expected = begin if bad is None else begin + bad
            sentence = f"answer {bad} of {item.name} has the seed {0 if bad is None else seeds[bad]:,}"
            sentence += ", which another of the step has" if again is not None else f", it should be {expected:,}"
            sides = f"{min(seeds, default=0):,} to {max(seeds, default=0):,}", f"{len(seeds):,} from {begin:,} on"
            of_step = At(Stage.ROLLOUT, asked.version)
            yield compare_value(of_step, where, *sides, same=bad is None, sentence=sentence)


def _repeats(trace: Trace, asked: SamplingAsked) -> Iterator[Comparison]:
    """The two answers of each group that are equal although that is unlikely, or none."""
    groups: dict[str, dict[str, tuple[bytes, float]]] = defaultdict(dict)
    for item in trace.of(Rollouts, version=asked.version):
        columns = [
            ragged.split(trace.array(item, name), item.lengths)
            for name in ("tokens", "versions", "logprobs", "sampled")
        ]
        for name, group, tokens, versions, nats, drawn in zip(item.ids, item.groups, *columns, strict=True):
            sum_ = float(nats[drawn.astype(bool)].astype(np.float64).sum())
            groups[group][name] = tokens.tobytes() + versions.tobytes(), sum_
    pairs = sum(len(own) * (len(own) - 1) // 2 for own in groups.values())
    bound = -RARE_NATS - math.log(max(pairs, 1))
    for group, own in groups.items():
        by_tokens: dict[bytes, list[str]] = defaultdict(list)
        for name, (tokens, _) in own.items():
            by_tokens[tokens].append(name)
        repeated = [(max(own[name][1] for name in names), names) for names in by_tokens.values() if len(names) > 1]
        nats, names = min(repeated, default=(0.0, []))
        sentence = f"{len(names)} answers to `{group}` are equal, and one of them has {nats:.4g} nats"
        right = f"{bound:.4g} nats or more of an answer that comes twice (2e-9 by chance, over {pairs:,} pairs)"
        found, at = f"{nats:.4g} nats, `{'` and `'.join(names[:2])}`", At(Stage.ROLLOUT, asked.version, "engine")
        same = not names or nats >= bound
        yield compare_value(at, f"answers to {group}", found, right, same=same, sentence=sentence)


def _reported(trace: Trace, asked: SamplingAsked) -> Iterator[Comparison]:
    """Winnings of bets against what the engine reported, on all sampled tokens and on those of one rollout."""
    for policy in trace.of(PolicyColumns, version=asked.version):
        old, engine = (trace.array(policy, name).astype(np.float64) for name in ("old", "engine"))
        sampled = (trace.array(policy, "version") >= 0) & ~np.isnan(old) & np.isfinite(engine)
        owner = np.repeat(np.arange(len(policy.lengths)), policy.lengths)[sampled]
        won = _won(old[sampled] - engine[sampled], owner, len(policy.lengths))
        places = [("the sampled tokens", float(_mixed(won.sum(axis=1))), RARE_NATS)]
        if len(policy.ids):
            each = _mixed(won)
            worst = int(each.argmax())
            bound = RARE_NATS + math.log(len(each))
            places.append((f"the sampled tokens of {policy.ids[worst]}", float(each[worst]), bound))
        at, words = At(Stage.ROLLOUT, asked.version, "engine"), "2e-9 by chance, and 2e-5 nats a token"
        hint = "look at what the engine reports of a token: temperature, token, request, weights"
        for what, nats, bound in places:
            sentence = f"{what} are e^{nats:.4g} times as likely by a mixture of what the trainer and the engine say "
            sentence += "of them as by what the engine says alone"
            noun = f"reports of {what}"
            yield compare_value(at, noun, nats, None, sentence=sentence, allowed=words, bound=bound, hint=hint)


def _won(nats: np.ndarray, owner: np.ndarray, rollouts: int) -> np.ndarray:
    """Nats [K, R] that a bet of each `STAKES` on p/q above 1 has won by rollout, from [T] log(p/q)."""
    ratios = np.minimum(nats, GREATEST_NATS)
    won = [np.log1p(stake * np.expm1(ratios)) - NORMALISED for stake in STAKES]
    return np.stack([np.bincount(owner, weights=item, minlength=rollouts) for item in won])


def _mixed(won: np.ndarray) -> np.ndarray:
    """Log of the mean of what the bets have made of 1; it is 1 on average as each of them is."""
    return np.asarray(np.logaddexp.reduce(won, axis=0) - math.log(len(won)))


def _fair(trace: Trace, asked: SamplingAsked) -> Iterator[Comparison]:
    noise = next(trace.of(SampledNoise, version=asked.version), None)
    nats, entropy = _drawn(trace, asked)
    if len(nats) < FEW_TOKENS or (noise is None and trace.manifest.dtype != "float32"):
        return
    above = -nats - entropy
    greatest = greatest_variance(entropy, asked.vocab_size)
    deviation = math.sqrt(float((above**2).sum()) / 3 + 2 * float(greatest.sum()) / 3)
    allowed = ERRORS * deviation
    if noise is not None:  # a log-probability that is off by r changes the mean by r times their deviation, at most
        allowed += math.sqrt(float(noise.squares)) * float(np.sqrt(greatest).sum())
    gap, kind = abs(float(above.sum())), "less" if above.sum() > 0 else "more"
    sentence = f"the {len(above):,} sampled tokens are {gap / len(above):.3g} nats {kind} likely each than draws at "
    sentence += f"temperature {asked.temperature:g} are"
    at, what = At(Stage.ROLLOUT, asked.version, "engine"), "log-probabilities of the tokens"
    sides = float(-nats.mean()), float(entropy.mean())
    words = f"{allowed / len(above):.3g} nats each, {ERRORS:g} deviations of fair draws"
    hint = "look at what the engine samples from: temperature, top-k, top-p, the model's generation_config"
    yield compare_value(at, what, *sides, sentence=sentence, allowed=words, bound=allowed, gap=gap, hint=hint)


def _drawn(trace: Trace, asked: SamplingAsked) -> np.ndarray:
    """[2, T] the trainer's log-probability and entropy at tokens of the first update that its weights sampled, nats."""
    columns = min(
        trace.of(LossColumns, version=asked.version), key=lambda item: int(item.name.rpartition(" ")[2]), default=None
    )
    policy = next(trace.of(PolicyColumns, version=asked.version), None)
    if columns is None or policy is None:
        return np.zeros((2, 0))
    versions = dict(zip(policy.ids, ragged.split(trace.array(policy, "version"), policy.lengths), strict=True))
    fresh = np.concatenate([_fresh(policy, versions[name]) for name in columns.ids])
    starts = np.concatenate([[0], np.cumsum(columns.lengths)])
    kept: list[np.ndarray] = []
    for item in trace.of(LossRows, version=columns.version, name=columns.name):
        arrays = trace.arrays(item)
        mask = arrays["mask"].astype(bool)
        sentinel = arrays["sentinel"][mask].astype(np.int64)
        place = starts[(sentinel >> POSITION_BITS) - 1] + (sentinel & ((1 << POSITION_BITS) - 1))
        both = np.stack([arrays["current"][mask], arrays["entropy"][mask]])[:, fresh[place]]
        kept.append(both.astype(np.float64))
    return np.concatenate(kept, axis=1) if kept else np.zeros((2, 0))


def _fresh(policy: PolicyColumns, versions: np.ndarray) -> np.ndarray:
    """[L] bool, tokens that the trained version sampled, and no other had a part in."""
    sampled = versions[versions >= 0]
    if policy.keep_kv_cache and len(sampled) and sampled[0] != policy.trained_version:
        return np.zeros(len(versions), bool)
    return np.asarray(versions == policy.trained_version)


def greatest_variance(entropy: np.ndarray, vocab_size: int) -> np.ndarray:
    """Greatest variance of a token's log-probability among all distributions of an entropy, nats squared.

    Source:
        Lagrange: a distribution at which the variance is stationary has two probabilities, as log p solves a quadratic
        equation. The greatest is that of one likely token and equal others; tests compare with all the rest.
    """
    others = vocab_size - 1
    low, high = np.zeros(len(entropy)), np.full(len(entropy), others / vocab_size)
    for _ in range(60):
        rest = (low + high) / 2
        found = -rest * np.log(np.maximum(rest, 1e-300)) - (1 - rest) * np.log1p(-rest) + rest * math.log(others)
        low, high = np.where(found < entropy, rest, low), np.where(found < entropy, high, rest)
    return np.asarray(high * (1 - high) * np.log((1 - high) * others / np.maximum(high, 1e-300)) ** 2)
