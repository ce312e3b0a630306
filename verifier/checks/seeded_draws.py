"""Samples of requests that are asked twice with one seed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from verifier.checks.conditions import EXPORTS
from verifier.checks.logprob_bounds import bounds_of
from verifier.checks.samples import TILTS, compare_with_chance, nats_of, rare_in
from verifier.core.check import Comparison, Trace, check
from verifier.core.condition import on, recorded, told
from verifier.core.records_tokens import SampledTokens

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
    "LGP018",
    needs=(SampledTokens,),
    applies=on(
        roundtrip=EXPORTS,
        loop=recorded(SampledTokens) & told("repeated seeds", "no request was asked again with its seed"),
    ),
)
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
