"""Log-probabilities of the same tokens from trainer, engine and the fp32 oracle."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from verifier.checks.bounds import bounds_of
from verifier.core.check import check
from verifier.core.comparison import Comparison, Difference, Tolerance, describe_difference
from verifier.core.record import Record
from verifier.core.records_logprobs import (
    DrawnTokens,
    EngineLogprobs,
    LogprobRecord,
    OracleLogprobs,
    OracleOfNext,
    OracleOfSampled,
    OracleOfShaped,
    OracleRecord,
    ReturnedLogprobs,
    SampledTokens,
    ShapedTokens,
    TrainerLogprobs,
)
from verifier.core.stage import Stage
from verifier.core.trace import Trace

LEAST_NATS = 0.5
"""Below this a log-probability is a small difference of great numbers, and has few bits by itself."""
FEW_VALUES = 4
"""Fewer values than these may all have few bits by chance."""
STATISTICS = {"mean": "on the mean", "median": "on the median"}
"""Statistic of the differences of all tokens, and its words in a sentence."""


def compare_logprobs(
    trace: Trace,
    actual: LogprobRecord,
    expected: LogprobRecord,
    stage: Stage,
    actual_says: str,
    expected_says: str,
    hint: str,
) -> Iterator[Comparison]:
    """One comparison per sequence, token by token, within the bounds of that stage."""
    got, want = trace.array(actual), trace.array(expected)
    lengths = expected.lengths
    if actual.lengths != lengths or got.size != sum(lengths) or want.size != sum(lengths):
        yield Comparison(
            what=actual.name, same=False, stage=stage, version=actual.version, badness=1.0,
            sentence=f"{actual_says} scored other numbers of tokens than {expected_says}",
            expected=str(list(lengths)), actual=str(list(actual.lengths)), allowed="exact",
        )  # fmt: skip
        return
    whole = expected.whole if isinstance(expected, OracleRecord) else ()
    bounds = bounds_of(trace, stage, expected.name, expected.version, lengths, whole)
    begin = 0
    for number, (length, worst_bound) in enumerate(zip(lengths, bounds.greatest, strict=True)):
        left, right = got[begin : begin + length], want[begin : begin + length]
        begin += length
        what = f"sequence {number}"
        yield _compare_one(actual, what, left, right, worst_bound, stage, actual_says, expected_says, hint)
    if trace.manifest.dtype != "float32":  # where it is, the bound on each token says so
        yield _rounded(actual, got, actual_says)
    for name, bound in bounds.body.items():
        value = _statistic(name, np.abs(got.astype(np.float64) - want.astype(np.float64)))
        same = value <= bound.absolute
        yield Comparison(
            what=f"{actual.name} {name}", same=same, stage=stage, version=actual.version,
            badness=_times(value, bound),
            sentence=f"log-probabilities of {actual_says} and {expected_says} differ by {value:.3g} nats "
            f"{STATISTICS[name]}, {bound.absolute:.3g} is allowed",
            owner=f"{actual.role} rank {actual.rank}", allowed=str(bound), hint=hint,
        )  # fmt: skip


def _compare_one(
    actual: Record, what: str, left: np.ndarray, right: np.ndarray, bound: Tolerance, stage: Stage,
    actual_says: str, expected_says: str, hint: str,
) -> Comparison:  # fmt: skip
    """Two sides' values of one sequence."""
    found = describe_difference(left, right)
    same = found.greatest <= bound.absolute and not found.num_not_finite
    if found.num_not_finite:
        sentence = _not_finite(left, what, actual_says) or _not_finite(right, what, expected_says)
    else:
        sentence = (
            f"log-probabilities of {actual_says} and {expected_says} differ by up to {found.greatest:.3g} nats "
            f"on {what}, {bound.absolute:.3g} is allowed"
        )
    return Comparison(
        what=f"{actual.name} {what}", same=same, stage=stage, version=actual.version,
        badness=_badness(found, bound), sentence=sentence, owner=f"{actual.role} rank {actual.rank}",
        expected=f"{_head(right)} ({expected_says})", actual=f"{_head(left)} ({actual_says})",
        mismatched=found.text, allowed=str(bound), hint=hint,
    )  # fmt: skip


def _rounded(actual: Record, got: np.ndarray, actual_says: str) -> Comparison:
    """Test for values of few bits, small ones apart: rounded after they were computed, which noise would hide.

    A difference of float32 logits of 32 and less has 18 bits where it is `LEAST_NATS` or more; the last ten are zeros
    by chance for one in a thousand.
    """
    values = got.astype(np.float32)[np.abs(got) >= LEAST_NATS]
    coarse = len(values) >= FEW_VALUES and not (values.view(np.uint32) & 0xFFFF).any()
    return Comparison(
        what=f"{actual.name} precision", same=not coarse, stage=actual.stage, version=actual.version,
        badness=float(coarse), owner=f"{actual.role} rank {actual.rank}",
        sentence=f"all {len(values):,} log-probabilities of {actual_says} are rounded to bfloat16",
        expected="float32, as they are computed", actual=f"{_head(values)}, 8 bits each", allowed="not all of them",
        hint="look at the dtype of the logits' softmax, and of what hands its result on",
    )  # fmt: skip


def _statistic(name: str, gaps: np.ndarray) -> float:
    return float(gaps.mean() if name == "mean" else np.median(gaps))


def _not_finite(values: np.ndarray, what: str, says: str) -> str:
    """Clause that counts one side's values that are not finite; empty if all are."""
    count = int((~np.isfinite(values)).sum())
    if not count:
        return ""
    return f"{count:,} of {values.size:,} log-probabilities that {says} gives for {what} are not finite"


def _badness(found: Difference, bound: Tolerance) -> float:
    if found.num_not_finite:
        return float("inf")
    return 0.0 if found.greatest <= bound.absolute else _times(found.greatest, bound)


def _times(value: float, bound: Tolerance) -> float:
    """Ratio to the bound; infinite for a bound of zero."""
    return value / bound.absolute if bound.absolute else float("inf")


def _head(values: np.ndarray) -> str:
    return "[" + ", ".join(f"{float(v):.5g}" for v in values[:3]) + (", ..." if values.size > 3 else "") + "]"


def logprob_pairs(
    trace: Trace, actual: type[LogprobRecord], expected: type[LogprobRecord]
) -> Iterator[tuple[LogprobRecord, LogprobRecord]]:
    """Records of the same name and version from two sides; the actual side must have its partner."""
    partners = {(item.name, item.version): item for item in trace.of(expected)}
    for item in trace.of(actual):
        if (item.name, item.version) not in partners:
            raise LookupError(f"nobody else scored `{item.name}` of version {item.version}")
        yield item, partners[item.name, item.version]


def following(trace: Trace, drawn: DrawnTokens) -> OracleOfNext:
    """The oracle's distribution, over the whole vocabulary, of what was drawn."""
    for item in trace.of(OracleOfNext, name=drawn.name, version=drawn.version):
        return item
    raise LookupError(f"nobody gave the distribution of `{drawn.name}` of version {drawn.version}")


@check("LGP001", needs=(TrainerLogprobs, OracleLogprobs), scope="logprob")
def trainer_logprob_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The trainer scores tokens as transformers in fp32 does with the same weights.

    What it checks: teacher-forced log-probabilities, token by token, at every version, against an independent
    implementation that holds the trainer's own live weights (joined without Megatron-Bridge; of a family without a
    layout row, the exported ones); and that every rank gets the same ones back. At version 0 at a temperature too, and,
    of a model without experts, of a sequence of 1,000 tokens.
    Why it matters: import and export that are wrong alike, a wrong rope base, epsilon or scaling, a misplaced label:
    all leave the round trip an identity.
    Evidence: logprob/trainer, logprob/oracle (arrays).
    Tolerance and its source: fp32 1e-5 nats, measured agreement 6.2e-6; bf16 twice the checkpoint's stored noise floor
    for sequences of that length, by token, mean and median, or without one the run's own noise. NaN and infinity
    are never allowed, on neither side.
    What it does not catch: what no scored token exercises (an expert that none is routed to: WGT001).
    References: Megatron-Bridge#3743, slime#1734, RL#1046, verl#4250, vllm and trl rows of the catalogue.
    """
    for actual, expected in logprob_pairs(trace, TrainerLogprobs, OracleLogprobs):
        yield from compare_logprobs(
            trace, actual, expected, Stage.LOGPROB, "the trainer", "the fp32 oracle",
            "if the loaded shards are right, look at the forward: rope, epsilon, scaling, masks, label alignment",
        )  # fmt: skip
    yield from _returned(trace)


def _returned(trace: Trace) -> Iterator[Comparison]:
    """One comparison per further rank and scoring: each rank goes on with what it got, not with what rank 0 did."""
    first: dict[tuple[str, int], str | None] = {}
    for item in trace.of(ReturnedLogprobs):
        key = (item.name, item.version)
        if key not in first:
            first[key] = item.digest
            continue
        same = item.digest == first[key]
        yield Comparison(
            what=f"{item.name} on rank {item.rank}", same=same, stage=Stage.LOGPROB, version=item.version,
            badness=1.0, owner=f"{item.role} rank {item.rank}",
            sentence=f"{item.role} rank {item.rank} got other log-probabilities than the first rank",
            expected=f"{first[key]} (the first rank)", actual=str(item.digest), allowed="exact (they are copied)",
            hint="look at the groups over which scores are gathered from the last stage",
        )  # fmt: skip


@check("LGP002", needs=(EngineLogprobs, OracleLogprobs), scope="rollout")
def engine_logprob_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The engine scores tokens as transformers in fp32 does with the trainer's weights, before and after each sync.

    What it checks: teacher-forced log-probabilities, token by token; of conversations too, of which the engine's prefix
    cache holds the beginning.
    Why it matters: it sees what the engine computes, whatever its tensors look like.
    Evidence: rollout/engine, logprob/oracle (arrays).
    Tolerance and its source: as LGP001.
    What it does not catch: what no scored token exercises (ENG001).
    References: SkyRL#1680, trl#5312, vllm#44371, vllm#42019.
    """
    for actual, expected in logprob_pairs(trace, EngineLogprobs, OracleLogprobs):
        yield from compare_logprobs(
            trace, actual, expected, Stage.ROLLOUT, "the engine", "the fp32 oracle",
            "if the engine's tensors are right, look at what its forward reads besides: caches, buffers, config",
        )  # fmt: skip


@check("LGP003", needs=(SampledTokens, OracleOfSampled), scope="rollout")
def sampled_logprob_differs_from_oracle(trace: Trace) -> Iterator[Comparison]:
    """The log-probabilities reported with sampled tokens are those of the synced weights.

    What it checks: tokens generated from prompts of several cache blocks, which were filled before the sync, scored
    again by the oracle; tokens generated from them once more, when the cache holds them and samples end one after
    another; and two samples each of the conversations' next turn, whose beginning the engine itself sampled. One
    prompt begins as another does, one says in its midst what another says there, and one grows into a further block.
    At version 0 also tokens sampled side by side at several temperatures, whose log-probabilities are those of the
    logits divided by it; a greedy one's are the greatest. In fp32 also tokens whose requests ask for penalties, biases,
    allowed tokens and truncation, and the samples that LGP004 counts.
    Why it matters: a prefix cache that outlives its weights answers from the old policy; log-probabilities of another
    distribution than was sampled from make every importance ratio wrong.
    Evidence: rollout/sampled, logprob/sampled-oracle, rollout/shaped, logprob/shaped-oracle, rollout/drawn,
    logprob/next (arrays).
    Tolerance and its source: as LGP001; where rounding decides which tokens a truncation keeps, from the nearest.
    What it does not catch: staleness of prompts shorter than a block (there is no cache entry); a greedy sample of
    another token that is reported as the likeliest.
    References: vLLM `reset_prefix_cache`, SkyRL#1212, verl#7511, vllm#394, vllm#14301, vllm#16863, RL#3497.
    """
    for actual, expected in logprob_pairs(trace, SampledTokens, OracleOfSampled):
        yield from compare_logprobs(
            trace, actual, expected, Stage.ROLLOUT, "the engine's sampler", "the fp32 oracle",
            "look at caches that were filled before the sync: prefix blocks, graphs",
        )  # fmt: skip
    if trace.manifest.dtype != "float32":  # noise moves the edge of a truncated distribution
        return
    for actual, expected in logprob_pairs(trace, ShapedTokens, OracleOfShaped):
        yield from compare_logprobs(
            trace, actual, expected, Stage.ROLLOUT, "the engine's sampler", "the fp32 oracle",
            "look at penalties, biases and truncation, and at which request of a batch they belong to",
        )  # fmt: skip
    for item in trace.of(DrawnTokens):
        bound = bounds_of(trace, Stage.ROLLOUT, item.name, item.version, [len(item.tokens)]).greatest[0]
        right = trace.array(following(trace, item))[list(item.tokens)]
        yield _compare_one(
            item, "samples", trace.array(item), right, bound, Stage.ROLLOUT, "the engine's sampler", "the fp32 oracle",
            "look at how the samples of one request are told apart, and who is given whose log-probabilities",
        )  # fmt: skip
