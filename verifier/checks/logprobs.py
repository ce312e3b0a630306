"""Log-probabilities of the same tokens from trainer, engine and the fp32 oracle, and what they may differ by."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from verifier.checks.conditions import EXPORTS, GRPO, SAMPLED, SCORED, SYNCED
from verifier.checks.logprob_bounds import STATISTICS, bounds_of
from verifier.checks.repeated_tokens import counted_once, repeated_tokens, tokens_apart
from verifier.core import ragged
from verifier.core.check import At, Comparison, Tolerance, Trace, check, compare_value, owner_of
from verifier.core.comparison import describe_difference
from verifier.core.condition import ALWAYS, on, recorded
from verifier.core.record import Record
from verifier.core.records_tokens import (
    DrawnTokens,
    DtypeNoise,
    EngineLogprobs,
    LogprobRecord,
    OracleLogprobs,
    OracleOfNext,
    OracleOfSampled,
    OracleOfShaped,
    OracleRecord,
    ReturnedLogprobs,
    SampledTokens,
    SampleRecord,
    ShapedTokens,
    TrainerLogprobs,
)

LEAST_NATS = 0.5
"""Below this a log-probability is a small difference of great numbers, and has few bits by itself."""
FEW_VALUES = 4
"""Fewer values than these may all have few bits by chance."""
ORACLE = "the fp32 oracle"
SAMPLER = "the engine's sampler"


def _temperatures(item: LogprobRecord) -> Sequence[float]:
    """Temperature of each sequence; nothing where it is not said."""
    if isinstance(item, TrainerLogprobs):
        return [item.temperature] * len(item.lengths)
    return item.temperatures if isinstance(item, SampleRecord) else ()


def compare_with_oracle(
    trace: Trace,
    kind: type[LogprobRecord],
    oracle: type[OracleRecord],
    actual_says: str,
    *,
    expected_says: str = ORACLE,
    version: int | None = None,
    third: type[LogprobRecord] | None = None,
) -> Iterator[Comparison]:
    """One comparison per sequence of every scoring, token by token, within the bounds of the actual side's stage.

    Where a `third` side scored the same and agrees with the actual one, a mismatch names the expected one as suspect.

    Raises:
        LookupError: the oracle did not score what the actual side did.
    """
    for actual in trace.of(kind, version=version):
        expected = next(trace.of(oracle, name=actual.name, version=actual.version), None)
        if expected is None:
            raise LookupError(f"nobody else scored `{actual.name}` of version {actual.version}")
        got, want, lengths = trace.array(actual), trace.array(expected), expected.lengths
        if actual.lengths != lengths or got.size != sum(lengths) or want.size != sum(lengths):
            sentence = f"{actual_says} scored other numbers of tokens than {expected_says}"
            at, counts = At(actual.stage, actual.version), (list(actual.lengths), list(lengths))
            yield compare_value(at, actual.name, *counts, same=False, sentence=sentence, allowed="exact")
            continue
        asked = (expected.name, expected.version, lengths, expected.whole, _temperatures(actual))
        told_apart = repeated_tokens(trace, actual, lengths), tokens_apart(actual, lengths)
        bounds = bounds_of(trace, actual.stage, *asked, *told_apart, trace.arrays(expected).get("scale"))
        other = next(trace.of(third, name=actual.name, version=actual.version), None) if third else None
        heard = trace.array(other) if other is not None and other.lengths == lengths else np.full_like(got, np.nan)
        sides = [ragged.split(side, lengths) for side in (got, want, heard)]
        rows = zip(*sides, bounds.greatest, strict=True)
        for number, (left, right, voice, bound) in enumerate(rows):
            found = _compare_one(actual, f"sequence {number}", left, right, bound, (actual_says, expected_says))
            agreed = describe_difference(left, voice)
            if not (found.same or agreed.num_not_finite) and agreed.greatest <= bound.absolute:
                found = _suspecting(found, agreed.greatest, expected_says)
            yield found
        if trace.manifest.dtype != "float32":  # where it is, the bound on each token says so
            yield _rounded(actual, got, actual_says)
        for name, bound in bounds.body.items():
            gaps = np.minimum(np.abs(got.astype(np.float64) - want.astype(np.float64)), bounds.most)
            value = float(STATISTICS[name](gaps if bounds.once is None else counted_once(gaps, bounds.once)))
            subject = f"the {name} of what log-probabilities of {actual_says} and {expected_says} differ by, nats,"
            yield compare_value(actual, f"{actual.name} {name}", value, None, subject=subject, allowed=bound)


def _compare_one(
    actual: Record, what: str, left: np.ndarray, right: np.ndarray, bound: Tolerance, says: tuple[str, str]
) -> Comparison:
    """Two sides' values of one sequence."""
    found = describe_difference(left, right)
    sentence = f"log-probabilities of {says[0]} and {says[1]} differ by up to {found.greatest:.3g} nats "
    sentence += f"on {what}, {bound.absolute:.3g} is allowed"
    for values, by in zip((right, left), says[::-1], strict=True):
        if count := int((~np.isfinite(values)).sum()):
            sentence = f"{count:,} of {values.size:,} log-probabilities that {by} gives for {what} are not finite"
    gap, sides = math.inf if found.num_not_finite else found.greatest, (_head(left), _head(right))
    compared = compare_value(
        actual, f"{actual.name} {what}", *sides, sentence=sentence, says=says, allowed=bound, gap=gap
    )
    return compared if compared.same else replace(compared, mismatched=found.text)


def _suspecting(found: Comparison, gap: float, expected_says: str) -> Comparison:
    """The finding where two of three sides agree: they share no code, so the one that stands alone is suspect."""
    return replace(
        found, sentence=f"{found.sentence}; trainer and engine agree within {gap:.3g}: suspect {expected_says}",
        owner=f"{expected_says} (transformers)",
        hint="trainer and engine share no code and agree: see first whether transformers reads all of config.json "
        "(MiniMax-M2's `rotary_dim` it does not: transformers #48241)",
    )  # fmt: skip


def _rounded(actual: Record, got: np.ndarray, actual_says: str) -> Comparison:
    """Test for values of few bits, small ones apart: rounded after they were computed, which noise would hide.

    A difference of float32 logits of 32 and less has 18 bits where it is `LEAST_NATS` or more; the last ten are zeros
    by chance for one in a thousand.
    """
    values = got.astype(np.float32)[np.abs(got) >= LEAST_NATS]
    coarse = len(values) >= FEW_VALUES and not (values.view(np.uint32) & 0xFFFF).any()
    sentence = f"all {len(values):,} log-probabilities of {actual_says} are rounded to bfloat16"
    what, sides = f"{actual.name} precision", (f"{_head(values)}, 8 bits each", "float32, as they are computed")
    hint = "look at the dtype of the logits' softmax, and of what hands its result on"
    return compare_value(actual, what, *sides, same=not coarse, sentence=sentence, hint=hint)


def _head(values: np.ndarray) -> str:
    return "[" + ", ".join(f"{float(v):.5g}" for v in values[:3]) + (", ..." if values.size > 3 else "") + "]"


def following(trace: Trace, drawn: DrawnTokens) -> OracleOfNext:
    """The oracle's distribution, over the whole vocabulary, of what was drawn."""
    for item in trace.of(OracleOfNext, name=drawn.name, version=drawn.version):
        return item
    raise LookupError(f"nobody gave the distribution of `{drawn.name}` of version {drawn.version}")


def _of_drawn(nats: np.ndarray, tokens: Sequence[int]) -> np.ndarray:
    """Log-probabilities of drawn tokens; minus infinity beyond the vocabulary."""
    return np.array([nats[token] if token < len(nats) else -math.inf for token in tokens], np.float64)


@check(
    "LGP001", needs=(TrainerLogprobs, ReturnedLogprobs, OracleLogprobs, DtypeNoise),
    applies=on(roundtrip=ALWAYS, step=GRPO & SAMPLED, loop=recorded(TrainerLogprobs) & SCORED),
)  # fmt: skip
def trainer_logprob_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The trainer scores tokens as transformers in fp32 does with the same weights.

    What it checks: teacher-forced log-probabilities, token by token, at every version, against an independent
    implementation that holds the trainer's own live weights (joined without Megatron-Bridge; of a family without a
    layout row, the exported ones); and that every rank gets the same ones back. At version 0 at a temperature too, and,
    of a model without experts, of a sequence of 1,000 tokens. On sampled steps of a training run (`verify.every`) `old`
    of all rollouts, by the weights before the step, and `reference`, by the checkpoint that the run began with, at the
    run's temperature.
    Why it matters: import and export that are wrong alike, a wrong rope base, epsilon or scaling, a misplaced label:
    all leave the round trip an identity.
    Evidence: logprob/trainer, logprob/oracle (arrays).
    Tolerance and its source: fp32 12 times the scale of rounding at each place: the root mean square over the
    vocabulary of what transformers in fp32 differs by from itself in float64; 1e-5 nats at least, divided by a
    temperature below 1. Chance of a false alarm below 1e-11 a token. bf16 twice the checkpoint's stored noise floor for
    sequences of that length, by token, mean and median, or without one the run's own noise. NaN and infinity are never
    allowed, on neither side. What ranks get back is exact.
    Where to look: the forward if the loaded shards are right: rope, epsilon, scaling, masks, label alignment; and the
    groups over which scores are gathered from the last stage.
    What it does not catch: what no scored token exercises (an expert that none is routed to: WGT001).
    References: Megatron-Bridge#3743, slime#1734, RL#1046, verl#4250, vllm and trl rows of the catalogue.
    """
    yield from compare_with_oracle(trace, TrainerLogprobs, OracleLogprobs, "the trainer", third=EngineLogprobs)
    first: dict[tuple[str, int], ReturnedLogprobs] = {}
    for item in trace.of(ReturnedLogprobs):  # each rank goes on with what it got, not with what rank 0 did
        expected = first.setdefault((item.name, item.version), item)
        if expected is not item:
            sentence = f"{owner_of(item)} got other log-probabilities than the first rank"
            what, sides = f"{item.name} on rank {item.rank}", (item.digest, expected.digest)
            yield compare_value(item, what, *sides, sentence=sentence, allowed="exact (they are copied)")


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
    begins as another does, one says in its midst what another says there, and one grows into a further block. At
    version 0 also tokens sampled side by side at several temperatures, whose log-probabilities are those of the logits
    divided by it; a greedy one's are the greatest. In fp32 also tokens whose requests ask for penalties, biases,
    allowed tokens and truncation, and the samples that LGP004 counts. On sampled steps of a training run every sampled
    token, by the weights of the version that the token claims.
    Why it matters: a prefix cache that outlives its weights answers from the old policy; log-probabilities of another
    distribution than was sampled from make every importance ratio wrong.
    Evidence: rollout/sampled, logprob/sampled-oracle, rollout/shaped, logprob/shaped-oracle, rollout/drawn,
    logprob/next (arrays).
    Tolerance and its source: as LGP001; where rounding decides which tokens a truncation keeps, from the nearest.
    Where to look: caches that were filled before the sync (prefix blocks, graphs); penalties, biases and truncation;
    and which request or sample of a batch is given whose log-probabilities.
    What it does not catch: staleness of prompts shorter than a block (there is no cache entry); a greedy sample of
    another token that is reported as the likeliest.
    References: vLLM `reset_prefix_cache`, SkyRL#1212, verl#7511, vllm#394, vllm#14301, vllm#16863, RL#3497.
    """
    yield from compare_with_oracle(trace, SampledTokens, OracleOfSampled, SAMPLER)
    if trace.manifest.dtype != "float32":  # noise moves the edge of a truncated distribution
        return
    yield from compare_with_oracle(trace, ShapedTokens, OracleOfShaped, SAMPLER)
    for item in trace.of(DrawnTokens):
        asked = item.stage, item.name, item.version, [len(item.tokens)]
        bound = bounds_of(trace, *asked, temperatures=[item.temperature]).greatest[0]
        expected = _of_drawn(trace.array(following(trace, item)), item.tokens)
        yield _compare_one(item, "samples", trace.array(item), expected, bound, (SAMPLER, ORACLE))
