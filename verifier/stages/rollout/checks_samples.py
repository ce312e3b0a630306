"""Tokens that an engine samples: from the policy's distribution, independently, up to the right end."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from verifier.core.check import LOOP, At, Comparison, Given, Tolerance, Trace, check, compare_value
from verifier.core.condition import NEEDS, on, recorded, told
from verifier.core.record import Record
from verifier.stages.checks_conditions import ALL_ANSWERS, EXPORTS, PLACED, SAMPLED, SCORED, SYNCED
from verifier.stages.logprob.checks_logprobs import ORACLE, bounds_of, compare_one, compare_with_oracle
from verifier.stages.logprob.records import (
    SHARES,
    OracleLogprobs,
    OracleOfNext,
    OracleOfPlaces,
    OracleOfSampled,
    OracleOfShaped,
    TrainerLogprobs,
)
from verifier.stages.rollout.records import DrawnTokens, EngineLogprobs, SampledTokens, ShapedTokens

RARE = 1e-6
"""Probability of a false alarm over one set of samples."""
RARE_IN_A_LOOP = 1e-10
"""The same in a recorded loop, which has a set in each step, of seeds that nobody has tried."""
TILTS = 32
"""Tilts of Chernoff's bound among which the best is found: where shares depend on earlier tokens each is a case."""


def _reported_noise(trace: Trace, drawn: DrawnTokens, distribution: np.ndarray) -> float:
    """Greatest distance of a drawn token's reported log-probability from the oracle's, nats; 0 in float32."""
    if trace.manifest.dtype == "float32":
        return 0.0
    with np.errstate(divide="ignore"):
        oracle = np.log(distribution[np.minimum(drawn.tokens, len(distribution) - 1)])
    off = np.abs(trace.array(drawn).astype(np.float64) - oracle)
    return float(off[np.isfinite(off)].max(initial=0.0))


def _nearest(share: float, found: float, noise: float) -> float:
    """The share nearest to what was found that a distribution may have whose log-probabilities are so far off, nats."""
    less, more = math.exp(-noise), math.exp(noise)
    low, high = max(share * less, 1 - (1 - share) * more), min(share * more, 1 - (1 - share) * less)
    return min(max(found, low), high)


def compare_with_chance(
    item: DrawnTokens | SampledTokens,
    nats: float,
    cases: int,
    actual: str,
    expected: str,
    sentence: str,
    rare: float = RARE,
) -> Comparison:
    """The unlikeliest of so many counts against what one run in a million exceeds."""
    chance = "once in a million" if rare == RARE else f"once in {1 / rare:,.0f}"
    source = f"Chernoff's bound on a binomial, exceeded by chance {chance} over {cases:,} counts"
    allowed, said = Tolerance(absolute=math.log(cases / rare), unit="nats", source=source), f"{nats:.3g} nats"
    says = "the engine", ""
    sides, texts = (actual, expected), Given(says=says, mismatched=said)
    return compare_value(item, item.name, *sides, sentence=sentence, allowed=allowed, gap=nats, **texts)


def rare_in(trace: Trace) -> float:
    """Probability of a false alarm over one set of samples of a trace."""
    return RARE_IN_A_LOOP if trace.manifest.command == LOOP else RARE


def nats_of(count: float, trials: float, share: float) -> float:
    """Unlikeliness of `count` in `trials`, nats: Chernoff's bound on the binomial tail beyond it.

    Source:
        Chernoff 1952; P(X >= count) or P(X <= count) is at most exp(-trials * KL(count / trials, share)).
    """
    found = count / trials
    gained = found * math.log(found / share) if found else 0.0
    lost = (1 - found) * math.log((1 - found) / (1 - share)) if found < 1 else 0.0
    return trials * (gained + lost)


@check(
    "LGP004",
    needs=(DrawnTokens, OracleOfNext, OracleOfPlaces),
    applies=on(roundtrip=EXPORTS, loop=recorded(SampledTokens) & ALL_ANSWERS & PLACED),
)
def sampled_from_another_distribution(trace: Trace) -> Iterator[Comparison]:
    """Tokens are drawn from the distribution that their log-probabilities are reported of, independently.

    What it checks: some hundred samples of one next token, and every token of some dozen samples, most of which follow
    on sampled ones: how many lie beyond the likeliest tokens of the oracle's distribution there that together have a
    tenth, a quarter, a half, ... of it (`SHARES`), against what chance allows. At the first version and at the last
    also samples of one token at a temperature of 2 and without seeds, and samples of a request that makes the first two
    ids of the vocabulary and the last two likely, each of which is counted. No id is beyond the vocabulary. Of the
    samples of one next token, half of them asked for by a second request with the same prompt, how many equal the one
    so many places later, for every number of places; of samples of several tokens, how many tokens repeat the one some
    places before.
    Why it matters: a temperature, a nucleus or a penalty that the sampler applies and the reported log-probabilities do
    not makes every importance ratio wrong, and each log-probability is right. Requests that share a seed repeat each
    other: a group of rollouts holds fewer than it seems to, and its advantages are zero or count twice.
    Evidence: rollout/drawn, rollout/sampled (token ids), logprob/next, logprob/places (the oracle's distributions).
    Tolerance and its source: Chernoff's bound on each count, exceeded by chance once in a million; seeds are fixed. In
    less than float32 a share of one next token may be off by what the reported log-probabilities of these tokens are
    off the oracle's, which LGP003 judges. Any two samples agree as often as in the oracle's distribution, or as all
    samples do if that is more.
    Where to look: temperature, top-p, top-k and penalties of the sampler; what the seed of each request and of each of
    its samples is made of, and whether a request's generator goes on from token to token.
    What it does not catch: changes of less than a few hundredths of the distribution; a distribution so peaked that
    independent samples agree as often as equal ones.
    References: verl#1949, trl#6945, vllm#42259, RL#3497, verl#5179, ms-swift#7858, ms-swift#4383.
    """
    for item in trace.of(DrawnTokens):
        distribution, total = np.exp(trace.array(following(trace, item)).astype(np.float64)), len(item.tokens)
        yield _within(item, item.tokens, len(distribution))
        counts = list(_beyond(distribution, item.tokens))
        rows = [("among its least likely tokens, which have", *row) for row in counts]
        for token, _ in item.bias:
            rows.append((f"token {token}, which has", float(distribution[token]), item.tokens.count(token)))
        noise = _reported_noise(trace, item, distribution)
        nats, which, share, count = max(
            (
                (nats_of(count, total, _nearest(share, count / total, noise)), which, share, count)
                for which, share, count in rows if 0 < share < 1
            ),
            key=lambda row: row[0], default=(0.0, "", 0.0, 0),
        )  # fmt: skip
        sentence = f"{total:,} sampled tokens are not spread as the policy's distribution: {count:,} are {which} "
        sentence += f"a share of {share:.3g}: {share * total:.0f} are expected"
        found, right = (
            _shown(count for _, count in counts),
            f"{_shown(share * total for share, _ in counts)} beyond each share",
        )
        yield compare_with_chance(item, nats, 2 * max(len(rows), 1), found, right, sentence)
        yield _agreeing(item, distribution)

    for sampled, arrays in _described(trace):
        (places,) = trace.of(OracleOfPlaces, name=sampled.name, version=sampled.version)
        yield _within(sampled, [token for tokens in sampled.tokens for token in tokens], places.vocabulary)
        beyond = arrays["rank"][:, None] >= arrays["kept"]
        nats, count, expected, _ = max(_unlikeliness(beyond, arrays["rest"]), default=(0.0, 0, 0.0, 0))
        sentence = f"{len(beyond):,} tokens of samples are not spread as the policy's distributions: {count:,} are "
        sentence += f"among the least likely tokens, {expected:.0f} are expected"
        found, right = _shown(beyond.sum(axis=0)), f"{_shown(arrays['rest'].sum(axis=0))} beyond each share"
        yield compare_with_chance(sampled, nats, 2 * TILTS * len(SHARES), found, right, sentence, rare_in(trace))
        yield _repeating(trace, sampled, arrays)


def _within(item: DrawnTokens | SampledTokens, tokens: Sequence[int], vocabulary: int) -> Comparison:
    beyond = [token for token in tokens if token >= vocabulary]
    found, right = f"{sorted(set(beyond))[:4]} (the engine)", f"ids below {vocabulary:,}, the vocabulary's size"
    sentence = f"{len(beyond):,} of {len(tokens):,} sampled tokens are none of the model's {vocabulary:,}"
    hint = "look at what cuts the padding of the head's rows off, and at which ids the sampler draws from"
    return compare_value(item, f"{item.name} ids", found, right, same=not beyond, sentence=sentence, hint=hint)


def _unlikeliness(hits: np.ndarray, shares: np.ndarray) -> Iterator[tuple[float, int, float, int]]:
    """Unlikeliness of each column's hits, nats, where each place has a share of its own; hits, expected hits, column.

    Both arrays are [places, columns]. A place without a share, NaN, does not count.

    Source:
        Hoeffding 1956, theorem 4: trials of unequal shares exceed no bound oftener than as many of their mean share.
    """
    for column, (hit, share) in enumerate(zip(hits.T, shares.T, strict=True)):
        there = ~np.isnan(share)
        expected, trials = float(share[there].sum()), int(there.sum())
        if 0 < expected < trials:
            count = int(hit[there].sum())
            yield nats_of(count, trials, expected / trials), count, expected, column


def _described(trace: Trace) -> Iterator[tuple[SampledTokens, Mapping[str, np.ndarray]]]:
    for item in trace.of(SampledTokens):
        places = next(trace.of(OracleOfPlaces, name=item.name, version=item.version), None)
        if places is None and trace.manifest.command == LOOP:  # whose weights of that version were not kept
            continue
        if places is None:
            raise LookupError(f"nobody gave the distributions of `{item.name}` of version {item.version}")
        yield item, trace.arrays(places)


def _beyond(share: np.ndarray, tokens: Sequence[int]) -> Iterator[tuple[float, int]]:
    """Beyond the likeliest tokens that have each of `SHARES` together: the share of the others, and their samples."""
    order = np.argsort(-share, stable=True)
    reached = share[order].cumsum()
    counts = np.bincount(np.array(tokens), minlength=len(share))[order]
    ends = np.searchsorted(reached, np.array(SHARES)) + 1
    for end in sorted(set(ends.tolist())):
        rest = float(share[order[end:]].sum())
        if 0 < rest < 1:
            yield rest, int(counts[end:].sum())


def _agreeing(item: DrawnTokens, distribution: np.ndarray) -> Comparison:
    """Samples of one next token that equal the one so many places later, for the unlikeliest number of places."""
    tokens = np.array(item.tokens)
    counts = np.bincount(tokens).astype(np.float64)
    alike = (counts * (counts - 1)).sum() / max(len(tokens) * (len(tokens) - 1), 1)  # share of all pairs
    by_chance = max(float(np.square(distribution).sum()), float(alike))
    found = [row for places in range(1, len(tokens)) for row in _alike(tokens, places, by_chance)]
    nats, places, count, pairs = max(found, default=(0.0, 0, 0, 0))
    sentence = f"{count:,} of {pairs:,} samples equal the one {places:,} places later, {by_chance * pairs:.1f} "
    sentence += "are expected to"
    sides = f"{count:,} of {pairs:,}", f"{by_chance:.3g} of them, as of any two"
    return compare_with_chance(item, nats, 2 * len(tokens), *sides, sentence)


def _repeating(trace: Trace, sampled: SampledTokens, arrays: Mapping[str, np.ndarray]) -> Comparison:
    """Tokens of samples that repeat the one some places before, for the unlikeliest number of places."""
    rows = _unlikeliness(arrays["repeats"], arrays["earlier"])
    nats, repeated, expected, back = max((row for row in rows if row[1] > row[2]), default=(0.0, 0, 0.0, 0))
    sentence = f"{repeated:,} tokens repeat the one sampled {back + 1} before, {expected:.1f} are expected to"
    cases, sides = TILTS * arrays["repeats"].shape[1], (f"{repeated:,}", f"{expected:.1f}")
    return compare_with_chance(sampled, nats, cases, *sides, sentence, rare_in(trace))


def _alike(tokens: np.ndarray, places: int, by_chance: float) -> Iterator[tuple[float, int, int, int]]:
    """Pairs so many places apart that hold one token: how unlikely so many are, the places, how many, of how many.

    Counted apart for two halves of the pairs, within which no sample is in two pairs, so that each count is binomial.
    """
    same = tokens[:-places] == tokens[places:]
    odd = (np.arange(len(same)) // places) % 2 == 1
    for half in (same[~odd], same[odd]):
        count = int(half.sum())
        if len(half) and count > by_chance * len(half):
            yield nats_of(count, len(half), by_chance), places, count, len(half)


@check(
    "LGP006", needs=(SampledTokens,),
    applies=on(roundtrip=EXPORTS, loop=NEEDS & told("finish reasons", "no reason is known for which an answer ended")),
)  # fmt: skip
def sample_ends_elsewhere(trace: Trace) -> Iterator[Comparison]:
    """A sample ends with the first token at which it was to stop, or else where its request's limit is.

    What it checks: tokens sampled without stop tokens, and with several that were sampled before with the same seed; of
    requests with other limits and stop tokens, side by side. And the cause of its end that is reported with a sample.
    Why it matters: a stop token that nobody heeds lets a rollout run on past its end, into text that no reward is meant
    for; one that is heeded too soon cuts it off. An answer that was cut off and is said to be whole is trained on.
    Evidence: rollout/sampled (token ids, stop tokens, the limit, the cause).
    Tolerance and its source: exact; a sample is as long as its own tokens say.
    Where to look: which stop tokens reach the engine, what it compares with them, and who hands the cause of an end on.
    What it does not catch: stop strings, and a limit that the engine takes from its model's length.
    References: verl#213, SkyRL#1319, OpenRLHF#1327, Trinity-RFT#608.
    """
    for item in (*trace.of(SampledTokens), *trace.of(ShapedTokens)):
        rows = zip(item.tokens, item.stops, item.limits, item.ended, strict=True)
        for number, (tokens, stop, limit, ended) in enumerate(rows):
            right = next((at + 1 for at, token in enumerate(tokens) if token in stop), limit)
            subject = f"the number of tokens of sample {number}"
            says = ("", f"the first of {sorted(stop)}, or {limit:,}")
            yield compare_value(item, f"{item.name} sample {number}", len(tokens), right, subject=subject, says=says)
            cause = "stop" if tokens and tokens[-1] in stop else "length"
            subject = f"the cause by which sample {number} is said to have ended"
            yield compare_value(item, f"{item.name} cause {number}", ended, cause, subject=subject)


def _shown(counts: Iterable[float]) -> str:
    return "[" + ", ".join(f"{count:.0f}" for count in counts) + "]"


SAMPLER = "the engine's sampler"


def following(trace: Trace, drawn: DrawnTokens) -> OracleOfNext:
    """The oracle's distribution, over the whole vocabulary, of what was drawn."""
    for item in trace.of(OracleOfNext, name=drawn.name, version=drawn.version):
        return item
    raise LookupError(f"nobody gave the distribution of `{drawn.name}` of version {drawn.version}")


def compare_cached(of: Record | At, name: str, cached: Sequence[int], common: Sequence[int]) -> Iterator[Comparison]:
    """The answer of a set whose prompt the prefix cache gave most keys too many, where somebody looked."""
    found = [(known - most, at) for at, (known, most) in enumerate(zip(cached, common, strict=False)) if most >= 0]
    for more, at in [max(found)] if found else ():
        what = f"the number of cached tokens of the prompt of answer {at} of {name}"
        right = f"at most {common[at]:,}, which another request since the last weights begins with"
        hint = "look at what the hash of a block is of, and at what resets the prefix cache at a sync"
        yield compare_value(of, what, f"{cached[at]:,}", right, same=more <= 0, subject=what, hint=hint)


@check(
    "LGP002",
    needs=(EngineLogprobs, OracleLogprobs),
    applies=on(roundtrip=EXPORTS, loop=recorded(EngineLogprobs) & SCORED),
)
def engine_logprob_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The engine scores tokens as transformers in fp32 does with the trainer's weights, before and after each sync.

    What it checks: teacher-forced log-probabilities, token by token; of conversations too, of which the engine's prefix
    cache holds the beginning.
    Why it matters: it sees what the engine computes, whatever its tensors look like.
    Evidence: rollout/engine, logprob/oracle (arrays).
    Tolerance and its source: as LGP001.
    Where to look: what its forward reads besides, if the engine's tensors are right: caches, buffers, config.
    What it does not catch: what no scored token exercises (ENG001).
    References: SkyRL#1680, trl#5312, vllm#44371, vllm#42019.
    """
    return compare_with_oracle(trace, EngineLogprobs, OracleLogprobs, "the engine", third=TrainerLogprobs)


@check(
    "LGP003", needs=(SampledTokens, OracleOfSampled, ShapedTokens, OracleOfShaped),
    applies=on(roundtrip=EXPORTS, step=SYNCED & SAMPLED, loop=recorded(SampledTokens, OracleOfSampled)),
)  # fmt: skip
def sampled_logprob_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The log-probabilities reported with sampled tokens are those of the synced weights.

    What it checks: tokens generated from prompts of several cache blocks, which were filled before the sync, scored
    again by the oracle; tokens generated from them once more, when the cache holds them and samples end one after
    another; and two samples each of the conversations' next turn, whose beginning the engine itself sampled. One prompt
    begins as another does, one says in its midst what another says there, and one grows into a further block. At the
    last version also tokens sampled side by side at several temperatures, whose log-probabilities are those of the
    logits divided by it; a greedy one's are the greatest. In fp32 also tokens whose requests ask for penalties, biases,
    allowed tokens, a least length and truncation, several at once and each alone in a batch, and the samples that
    LGP004 counts. Of all these the number of prompt tokens that the engine's prefix cache is reported to have held,
    against those with which another request since the last weights begins. At the last version also of prompts that
    differ from a cached one by one token, by the 256th, and by two blocks in each other's places. On sampled steps of a
    training run every sampled token, or those of some rollouts (`verify.rollouts`), by the weights of the version that
    the token claims.
    Why it matters: a prefix cache that outlives its weights answers from the old policy; log-probabilities of another
    distribution than was sampled from make every importance ratio wrong.
    Evidence: rollout/sampled, logprob/sampled-oracle, rollout/shaped, logprob/shaped-oracle, rollout/drawn,
    logprob/next (arrays).
    Tolerance and its source: as LGP001; where rounding decides which tokens a truncation keeps, from the nearest.
    Cached tokens: exact, no more than are in common, never the last; vLLM caches whole blocks, and reports fewer.
    Where to look: caches that were filled before the sync (prefix blocks, graphs); penalties, biases and truncation;
    and which request or sample of a batch is given whose log-probabilities.
    What it does not catch: staleness of prompts shorter than a block (there is no cache entry); a greedy sample of
    another token that is reported as the likeliest.
    References: vLLM `reset_prefix_cache`, SkyRL#1212, verl#7511, vllm#394, vllm#14301, vllm#16863, RL#3497.
    """
    yield from compare_with_oracle(trace, SampledTokens, OracleOfSampled, SAMPLER)
    for each in (*trace.of(SampledTokens), *trace.of(ShapedTokens)):
        yield from compare_cached(each, each.name, each.cached, each.common)
    if trace.manifest.dtype != "float32":  # noise moves the edge of a truncated distribution
        return
    yield from compare_with_oracle(trace, ShapedTokens, OracleOfShaped, SAMPLER)
    for item in trace.of(DrawnTokens):
        asked = item.stage, item.name, item.version, [len(item.tokens)]
        bound = bounds_of(trace, *asked, temperatures=[item.temperature]).greatest[0]
        nats = trace.array(following(trace, item))  # of no token beyond the vocabulary
        expected = np.array([nats[token] if token < len(nats) else -math.inf for token in item.tokens], np.float64)
        yield compare_one(item, "samples", trace.array(item), expected, bound, (SAMPLER, ORACLE))
