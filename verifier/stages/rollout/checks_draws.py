"""Draws of tokens against their probabilities, of ends of answers, and of requests with a seed."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from verifier.core import ragged
from verifier.core.check import At, Comparison, Stage, Trace, check, compare_value
from verifier.core.condition import NEEDS, condition, knob, on, recorded, told
from verifier.knob import flat
from verifier.stages.advantage.records import LossColumns, PolicyColumns
from verifier.stages.checks_conditions import ENDS, EXPORTS, FRESH, LIVE, SAMPLED
from verifier.stages.data.checks_handed_on import adapters_named
from verifier.stages.data.records import RequestSeeds, SamplingAsked
from verifier.stages.logprob.checks_logprobs import GREATEST_NOISES, bounds_of
from verifier.stages.logprob.records import OracleEnds, SampledNoise
from verifier.stages.loss.records import LossRows
from verifier.stages.pack.checks_packing import POSITION_BITS
from verifier.stages.pack.records import Rollouts
from verifier.stages.rollout.checks_samples import TILTS, compare_cached, compare_with_chance, nats_of, rare_in
from verifier.stages.rollout.records import SampledTokens

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
    step, round, turn, place), and that no two of a step are equal; of answers without a seed, that of the generator
    which serves all of an engine, against the closed form by (seed, step, round, turn, engine); that they asked their
    library for the run's temperature, and for nothing else that changes a distribution: no truncation, penalty, bias or
    least length; and, where the engine gets adapters, for that of the version that their tokens claim, by its name. The
    prompt tokens that the prefix cache is reported to have held, against those with which another request since the
    last weights begins. Two answers of a group with the same tokens, unless that is likely: less than e^-20 over all
    pairs of the step. Over all tokens in the loss of the first update that the trained version sampled, the sum of what
    their log-probability, negated, is above the entropy of the trainer's distribution there: 0 on average, whatever was
    sampled before. Over all sampled tokens, of whatever weights, and over those of each rollout: the product of 1 - s +
    s p/q, where p is the trainer's probability of a token and q the one that the engine reported, for a stake s of a
    half and of a tenth. If a token was drawn by q, p/q is 1 on average.
    Why it matters: the same seeds in every step, in a group, or on two engines, train on fewer answers than it seems.
    An engine that samples greedily, from the likeliest tokens alone, or at another temperature, and reports
    log-probabilities of the full distribution, agrees with the trainer on every token that it was asked about.
    Evidence: data/asked (as the config asks), data/seeds, pack/rollouts, loss/rows, advantage/columns,
    advantage/policy; in bf16 logprob/sampled-noise.
    Tolerance and its source: exact seeds and knobs; no more cached tokens than are in common. For the sum six times the
    root of a third of the sum of squares and two thirds of the greatest variance that a log-probability can have at
    that entropy (Delyon 2009), and in bf16 what this run's noise can change. Of 100 tokens or more. For the product
    e^20, of a rollout times their number: chance exceeds it in 2e-9 of steps (Ville 1939). Float32 adds 2e-5 nats a
    token.
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
            for turn, facts in enumerate(zip(item.cached, item.common, strict=True)):
                yield from compare_cached(At(Stage.ROLLOUT, asked.version), f"{item.name}, turn {turn}", *facts)
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
    config = flat(trace.manifest.config)
    ahead = config.get("grpo.max_staleness", 1) if config.get("grpo.mode", "sync") != "sync" else 0
    return {*range(max(asked.version - 1 - ahead, 0), asked.version)}


def _seeds(trace: Trace, asked: SamplingAsked) -> Iterator[Comparison]:
    seen: dict[int, tuple[int, int, int]] = {}
    for item in trace.of(RequestSeeds, version=asked.version):
        place = ((asked.version - 1) * asked.max_rounds + item.round) * asked.max_turns * asked.batch_size
        for turn, seeds in enumerate(item.turns):
            begin = ((asked.seed or 0) * SEEDS + place + turn * asked.batch_size) * asked.group_size
            where = f"seeds of {item.name}" + (f", turn {turn}" if turn else "")
            if not flat(trace.manifest.config).get("grpo.request_seeds", True):
                yield _shared(asked, where, begin // asked.group_size, seeds, 1 if turn else asked.group_size)
                continue
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


def _shared(asked: SamplingAsked, where: str, first: int, seeds: Sequence[int], each: int) -> Comparison:
    """Generators that serve all answers of an engine, each with a seed of its own, where their seeds are known."""
    right = [-2 - first - at // each % asked.replicas for at in range(len(seeds))]
    wrong = next((at for at, seed in enumerate(seeds) if seed not in (-1, right[at])), None)
    found, expected = (-1, -1) if wrong is None else (seeds[wrong], right[wrong])
    said = f"has the seed {found:,} of its own" if found > -1 else f"is drawn by a generator of the seed {-2 - found:,}"
    sentence = f"answer {wrong} {said}, it should be drawn by its engine's, of the seed {-2 - expected:,}"
    return compare_value(At(Stage.ROLLOUT, asked.version), where, found, expected, sentence=sentence)


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


WHOLE_DRAWS = condition(
    "answers are replaced for what was sampled, or the engine draws from rounded weights",
    lambda run: knob(run, "grpo.max_sampling_rounds") == 1 and not knob(run, "engine.quantization"),
)  # fmt: skip


@check(
    "LGP014",
    needs=(SamplingAsked, SampledTokens, OracleEnds),
    applies=on(step=FRESH & WHOLE_DRAWS & SAMPLED, loop=recorded(SamplingAsked, SampledTokens) & ENDS),
)
def answers_end_unfairly(trace: Trace) -> Iterator[Comparison]:
    """Answers end as often as draws from the policy do: they are all that were drawn, whatever their length.

    What it checks: on sampled steps of a training run (`verify.every`), over all tokens that the weights before the
    step sampled, or those of some rollouts (`verify.rollouts`), the number of end tokens among them against the sum of
    the probabilities that transformers in fp32 gives an end token at each, at the run's temperature.
    Why it matters: an engine that is asked for more answers than are trained on, and keeps those that end first, gives
    each token its right log-probability, and the policy learns from short answers alone.
    Evidence: data/asked, rollout/sampled, logprob/ends (array).
    Tolerance and its source: six times the root of a third of the sum of squares and two thirds of the sum of variances
    (Delyon 2009), and three times what the run's dtype changes of the probabilities.
    Where to look: which of the answers that were drawn are handed on: the first to finish, the shortest.
    What it does not catch: a choice by anything but length; one of few answers ; any where the weights leave no choice
    of a length. Steps between the sampled ones; steps with several rounds of sampling; quantized engines; tokens of
    older weights.
    References: verl#2929.
    """
    for asked in trace.of(SamplingAsked):
        for oracle in trace.of(OracleEnds, version=asked.version - 1):
            for sampled in trace.of(SampledTokens, version=oracle.version, name=oracle.name):
                yield _compare(asked, oracle, trace.array(oracle), sampled)


def _compare(asked: SamplingAsked, oracle: OracleEnds, chance: np.ndarray, sampled: SampledTokens) -> Comparison:
    ended = np.isin(np.array([token for own in sampled.tokens for token in own]), oracle.ends)
    if len(ended) != len(chance):
        raise LookupError(f"the oracle gave {len(chance):,} probabilities of an end for {len(ended):,} tokens")
    if not {asked.end, *asked.other_ends} <= {*oracle.ends}:
        raise LookupError(f"the oracle added the probabilities of {oracle.ends}, an answer ends at {asked.end} too")
    above = ended - chance
    deviation = math.sqrt(float((above**2).sum()) / 3 + 2 * float((chance * (1 - chance)).sum()) / 3)
    allowed = ERRORS * deviation + GREATEST_NOISES * float(oracle.noise)
    total = float(above.sum())
    sentence = f"{int(ended.sum()):,} answers or turns end within {len(ended):,} sampled tokens, of fair draws "
    sentence += (
        f"{float(chance.sum()):.4g} would: the answers are {'shorter' if total > 0 else 'longer'} than draws are"
    )
    words = f"{allowed:.3g}, {ERRORS:g} deviations of fair draws and {GREATEST_NOISES} times this run's noise"
    at, what, says = At(Stage.ROLLOUT, asked.version, "engine"), "ends of the answers", ("", "transformers in fp32")
    found, right, gap = float(ended.sum()), float(chance.sum()), abs(total)
    return compare_value(at, what, found, right, sentence=sentence, says=says, allowed=words, bound=allowed, gap=gap)


_ADAPTER = re.compile(r"^adapter=[^,]*(, )?")
NEUTRAL = "temperature 1, all else neutral"


def compare_knobs(
    name: str, answers: str, temperature: float, found: Iterable[str], version: int,
    adapters: Collection[str] | None = (),
) -> Iterator[Comparison]:  # fmt: skip
    """Compare the knobs of each kind of request with a temperature, and with nothing else that changes a distribution.

    Args:
        name: of the requests.
        answers: words for what they asked for.
        temperature: that the config has for them.
        found: knobs that are not neutral, as `RequestSeeds` has them; once for each kind.
        version: of the weights.
        adapters: that they may name, of which each has to name one; empty for a run whose engine gets none, None where
            it is not known which it had.
    """
    cold = "" if temperature == 1 else f"temperature={temperature!r}"
    rights = [", ".join(text for text in (own and f"adapter={own}", cold) if text) for own in adapters or ()] or [cold]
    right = " or ".join(text or NEUTRAL for text in rights)
    known = found if adapters is not None else (_ADAPTER.sub("", words) for words in found)
    for words in known:
        at = At(Stage.ROLLOUT, version, "engine")
        hint = "look at the defaults of a request (generation_config, a server's) and its adapter"
        subject, same = f"the knobs of {answers}", words in rights
        yield compare_value(at, f"requests {name}", words or NEUTRAL, right, same=same, subject=subject, hint=hint)


SIDES = 2
"""Answers of which each may be off by the bound on a log-probability."""
Key = tuple[tuple[int, ...], int, float]
"""Prompt, seed and temperature of a request."""


@dataclass(frozen=True, slots=True)
class _Answer:
    name: str
    number: int
    tokens: tuple[int, ...]
    bound: float
    """Nats that its log-probabilities may be off by: each of them in fp32, on average in less."""


@check(
    "LGP018", needs=(SampledTokens,),
    applies=on(roundtrip=EXPORTS, loop=NEEDS & told("repeated seeds", "no request was asked again with its seed")),
)  # fmt: skip
def seeded_sample_not_repeated(trace: Trace) -> Iterator[Comparison]:
    """A request that is asked again with its seed is answered alike, whatever else is in the engine's batch.

    What it checks: samples of one version whose requests have the same prompt, seed and temperature, in pairs, up to
    the end of the shorter: some that are asked again with tokens at which to stop, and some in another order, so that
    each is in another row of the batch and other rows move when a request ends.
    Why it matters: a seed that the sampler ignores, or a generator that serves another request from some token on,
    draws fair tokens with right log-probabilities. No resume, no replay and no second run has the same samples then.
    Evidence: rollout/sampled (token ids, seeds as the engine's process gave them).
    Tolerance and its source: rounding may turn a draw. Two races with the same noise end otherwise with a probability
    of at most twice the distance of their distributions (Daliri, Musco and Suresh 2024), so of at most twice the bound
    of LGP003; in less than fp32 twice that on the mean, of sets of 100 tokens or more alone. Chernoff's bound on the
    number of samples that part, exceeded by chance once in a million.
    Where to look: whether the sampler draws with the generator of each request, also after rows have moved.
    What it does not catch: a seed that is exchanged in the same way both times (LGP004); in bf16, generators of few of
    the requests; a training run's draws.
    References: vllm#51226, vllm#19940, tt-metal#46350, NeMo-RL#226.
    """
    for version in sorted({item.version for item in trace.of(SampledTokens)}):
        items = [item for item in trace.of(SampledTokens, version=version) if item.seeds]
        pairs = [*_pairs(trace, items)]
        if not pairs:
            continue
        parted, places = [], 0
        for first, second in pairs:
            common = min(len(first.tokens), len(second.tokens))
            at = next((at for at in range(common) if first.tokens[at] != second.tokens[at]), None)
            places += common if at is None else at + 1
            if at is not None:
                parted.append((first, second, at))
        share = SIDES * max(max(first.bound, second.bound) for first, second in pairs)
        judged = places > 0 and share < 1 and len(parted) > share * places
        nats = nats_of(len(parted), places, share) if judged else 0.0
        named = parted[0][1].name if parted else items[-1].name
        where = f"sample {parted[0][0].number} of `{parted[0][0].name}` at its token {parted[0][2]}" if parted else ""
        sentence = (
            f"{len(parted):,} of {len(pairs):,} samples that were asked for again with their seed differ, first {where}"
        )
        right = f"the same tokens, but for {share * places:.2g} draws that rounding turns"
        found = f"{len(parted):,} of {len(pairs):,} samples part within {places:,} tokens"
        item = next(item for item in items if item.name == named)
        yield compare_with_chance(item, nats, TILTS, found, right, sentence, rare_in(trace))


def _pairs(trace: Trace, items: list[SampledTokens]) -> Iterator[tuple[_Answer, _Answer]]:
    """Each answer to a request that was asked before, with the first answer to it."""
    seen: dict[Key, _Answer] = {}
    for item in items:
        whole = [len(prompt) + length for prompt, length in zip(item.prompts, item.lengths, strict=True)]
        found = bounds_of(trace, item.stage, item.name, item.version, item.lengths, whole, item.temperatures)
        bounds = [bound.absolute for bound in found.greatest]
        if trace.manifest.dtype != "float32":
            if "mean" not in found.body:  # few tokens, whose greatest noise says nothing of a draw
                continue
            bounds = [found.body["mean"].absolute] * len(bounds)
        rows = zip(item.prompts, item.seeds, item.temperatures, item.tokens, bounds, strict=True)
        for number, (prompt, seed, temperature, tokens, bound) in enumerate(rows):
            if seed is None or not temperature:
                continue
            answer = _Answer(item.name, number, tuple(tokens), bound)
            first = seen.setdefault((prompt, seed, temperature), answer)
            if first is not answer:
                yield first, answer
