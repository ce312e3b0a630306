"""Importance ratios of the first update."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np

from verifier.core import ragged
from verifier.core.check import LOOP, At, Comparison, Given, Stage, Trace, check, compare_value, owner_of
from verifier.core.condition import on, recorded
from verifier.stages.advantage.checks import LIMIT
from verifier.stages.advantage.records import PolicyColumns
from verifier.stages.checks_conditions import GRPO, UPDATED
from verifier.stages.logprob.checks_logprobs import GREATEST_NOISES
from verifier.stages.logprob.records import SampledNoise
from verifier.stages.loss.records import LossTerms, UpdateRatios
from verifier.stages.pack.checks_loss_rows import updates_of
from verifier.stages.rollout.checks_engine_mismatch import MEASURED, bound_in_fp32, greatest_nats

CLAMPED_RATIO = 0.999999
"""Least distance from 1 of a ratio that is clamped: exp(-20) is 2e-9."""
CLAMPED_KL = LIMIT - 1
"""Least KL estimate of a token whose distance from the reference is clamped, nats: exp(-d) - 1 + d at d = 20."""


def _loops_bound(trace: Trace, version: int) -> float:
    """Most nats that two passes of a recorded loop over the same weights may be apart; 0 of runs of this trainer."""
    if trace.manifest.command != LOOP:
        return 0.0
    if trace.manifest.dtype in ("", "float32"):
        temperature = next((terms.temperature for terms in trace.of(LossTerms, version=version)), 1.0)
        return bound_in_fp32(trace, version, temperature).absolute
    noise = next(trace.of(SampledNoise, version=version))
    return GREATEST_NOISES * float(greatest_nats(noise, np.array([-math.inf]))[0])


def _current_is_old(trace: Trace) -> Iterator[Comparison]:
    """Log-probabilities of the first update of a batch against `old`, where the ratio divides by the engine's."""
    firsts = {(item.version, item.name) for item in trace.of(UpdateRatios) if item.first and item.ratio_over != "old"}
    for update in updates_of(trace) if firsts else ():
        columns = update.columns
        if (columns.version, columns.name) not in firsts:
            continue
        for policy in trace.of(PolicyColumns, version=columns.version):
            rows = dict(zip(policy.ids, ragged.split(trace.array(policy, "old"), policy.lengths), strict=True))
            old = np.concatenate([rows[name] for name in columns.ids])[update.place]
            gaps = np.abs(update.rows["current"].astype(np.float64) - old)
            gaps = np.where(gaps <= _loops_bound(trace, columns.version), 0.0, gaps)
            yield _scored_alike(gaps, f"log-probabilities of {columns.name}", columns.version, "the loss")


def _reference_is_old(trace: Trace) -> Iterator[Comparison]:
    """The reference's log-probabilities of all mini-batches against `old`, before the first update of the run."""
    for version in sorted({item.version for item in trace.of(UpdateRatios) if item.at_reference}):
        for policy in trace.of(PolicyColumns, version=version):
            arrays = trace.arrays(policy)
            own = arrays.get("own", arrays["mask"]).astype(bool)  # traces of older runs have the second alone
            for name, reader in (("penalty_reference", "the penalty"), ("reference", "the loss")):
                if name in arrays:
                    gaps = np.abs(arrays[name].astype(np.float64) - arrays["old"])[own]
                    yield _scored_alike(gaps, "log-probabilities of the reference", version, reader)


def _scored_alike(gaps: np.ndarray, what: str, version: int, read_by: str) -> Comparison:
    worst = float(np.max(gaps, initial=0.0))  # NaN stays
    subject = f"the {what} that {read_by} reads, in nats from `old` by the same weights,"
    at, what, part = At(Stage.LOGPROB, version), f"{what} that {read_by} reads", f"tokens: {np.count_nonzero(gaps):,}"
    badness = worst if math.isfinite(worst) else math.inf
    return compare_value(at, what, worst, 0.0, subject=subject, badness=badness, mismatched=part)


@check("LSS003", needs=(UpdateRatios,), applies=on(step=GRPO & UPDATED, loop=recorded(UpdateRatios) & MEASURED))
def first_ratio_is_not_one(trace: Trace) -> Iterator[Comparison]:
    """Before the weights have moved the ratio to `old` is exactly 1, and at the reference the KL is exactly 0.

    What it checks: per rank, the first update of each batch whose ratio divides by `old`: the greatest distance of a
    ratio from 1; and the first update of the run: the greatest KL estimate. In every update: no token is clamped where
    all ratios and KL estimates are those of log-ratios within 20 nats. Of the first update of each batch whose ratio
    divides by `engine`: the log-probability of each token in the loss against `old`. And before the first update of the
    run: the reference's log-probability of each answer's token against `old`, in all mini-batches, wherever the KL is.
    Why it matters: log-probabilities of another temperature, of a dropout that is on, of other weights or of shifted
    tokens all show here, at no cost, in every step.
    Evidence: loss/ratios, and beside them loss/rows, advantage/columns and advantage/policy.
    Tolerance and its source: exact; the same weights score the same micro-batches by the same kernels. A recorded loop
    may score batches of other shapes: as LGP009, for one token.
    Where to look: temperature, dropout, weights and alignment of both passes.
    What it does not catch: later updates of a batch, whose ratio is not 1, and KL estimates of weights far from the
    reference: these may be clamped; a reference that is scored wrongly from a later step on (LGP001, LGP013); an `old`
    and a `current` that are wrong alike (LGP001).
    References: trl#4159, OpenRLHF#853, SkyRL#1353, prime-rl#2601, marin#1741.
    """
    yield from _current_is_old(trace)
    yield from _reference_is_old(trace)
    for item in trace.of(UpdateRatios):
        facts, nats = [], _loops_bound(trace, item.version)
        if item.first and item.ratio_over == "old":
            facts.append(("ratio", "greatest distance of a ratio from 1", float(item.ratio_gap)))
        if item.at_reference:
            facts.append(("KL", "greatest KL estimate", float(item.kl_gap)))
        far = float(item.ratio_gap) >= CLAMPED_RATIO or float(item.kl_gap) >= CLAMPED_KL
        facts.append(("clamps", "number of clamped tokens", 0.0 if far else float(item.clamped)))
        at = At(Stage.LOGPROB, item.version, owner_of(item))
        for what, words, actual in facts:
            badness, place = actual if math.isfinite(actual) else math.inf, f"of {item.name} on rank {item.rank}"
            why = f"no log-ratio is beyond {LIMIT:g} nats" if what == "clamps" else "the weights have not moved"
            subject, says = f"the {words} {place}", ("", why)
            texts = Given(subject=subject, says=says, badness=badness)
            same = actual <= (math.expm1(nats) if what == "ratio" else 0.0)
            yield compare_value(at, f"{what} {place}", actual, 0.0, same=same, **texts)
