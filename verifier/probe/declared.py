"""Undertakings of a recorded loop, and the facts of what it recorded."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import Literal, get_args

import numpy as np

from verifier.core.manifest import Facts
from verifier.core.record import Record, UnknownRecord, kind_of
from verifier.core.trace import Trace
from verifier.stages.advantage.records import Advantages, LossColumns, PolicyColumns
from verifier.stages.data.records import Drops, RequestSeeds, SamplingAsked
from verifier.stages.engine.records import CheckpointView, ExpectedView
from verifier.stages.export.records import ExportedTensor, SavedCheckpoint
from verifier.stages.load.records import Unbounded
from verifier.stages.logprob.records import (
    OracleLogprobs,
    OracleOfSampled,
    ReferenceShard,
    SampledNoise,
    TrainerLogprobs,
)
from verifier.stages.loss.records import GradientRecord, LossRows, LossTerms
from verifier.stages.pack.records import PackedBatchDigest, Rollouts
from verifier.stages.plan.records import PlanDigest
from verifier.stages.reward.records import GivenRewards
from verifier.stages.rollout.records import SampledTokens
from verifier.stages.train.records import JoinedTensor, LiveAdapterMatrix
from verifier.stages.transport.records import Handover, ReceivedTensor

Undertaking = Literal["export", "transfer", "engine weights", "engine logprobs", "policy", "oracle", "gradients"]
"""Something that a loop says in advance it will record."""
UNDERTAKINGS: dict[Undertaking, tuple[type[Record], ...]] = {
    "export": (ExportedTensor, JoinedTensor),
    "transfer": (ReceivedTensor, Handover),
    "engine weights": (CheckpointView, ExpectedView),
    "engine logprobs": (PolicyColumns, SampledTokens, SampledNoise),
    "policy": (PolicyColumns, Advantages, Drops),
    "oracle": (TrainerLogprobs, OracleLogprobs, SampledTokens, OracleOfSampled),
    "gradients": (GradientRecord,),
}
assert tuple(UNDERTAKINGS) == get_args(Undertaking)


def facts_of(trace: Trace, undertaken: Sequence[str]) -> Facts:
    """Facts of a recorded loop.

    Args:
        trace: what was recorded.
        undertaken: names of `UNDERTAKINGS`, whose records are declared whatever was recorded.
    """
    found: dict[str, dict[str, set[int]]] = {
        kind_of(kind): {} for name, kinds in UNDERTAKINGS.items() if name in undertaken for kind in kinds
    }
    everything: tuple[Record | UnknownRecord, ...] = (*trace.records, *trace.unknown)
    for item in everything:
        # An engine rank has a plan of what it received; it is compared where the trainer's is there.
        if not isinstance(item, PlanDigest) or item.role == "trainer":
            kind = kind_of(type(item)) if isinstance(item, Record) else item.kind
            found.setdefault(kind, {}).setdefault(f"{item.role} {item.rank}", set()).add(item.version)
    return Facts(
        recorded={kind: {by: tuple(sorted(own)) for by, own in who.items()} for kind, who in found.items()},
        exported=tuple(trace.versions(ExportedTensor)),
        estimators=tuple(dict.fromkeys(item.estimator for item in trace.of(Advantages))),
        told=tuple(_told(trace)),
        unbounded={**dict(_of_several(trace)), **{item.name: item.why for item in trace.of(Unbounded)}},
        frozen_base=trace.has(LiveAdapterMatrix), has_reference=trace.has(ReferenceShard),
        lost_logprobs=any(not np.isfinite(trace.array(item)).all() for item in trace.of(SampledTokens)),
    )  # fmt: skip


def _of_several(trace: Trace) -> Iterator[tuple[str, str]]:
    """Kinds of records that nothing can join over ranks, each with the reason."""
    kinds: tuple[type[Record], ...] = (LossColumns, LossRows)
    batches: dict[tuple[int, str], set[bytes]] = defaultdict(set)
    for item in trace.of(Rollouts):
        tokens = trace.array(item, "tokens").tobytes()
        for name in item.ids[:1]:
            batches[item.version, name].add(tokens)
    divisors: dict[int, set[float | None]] = defaultdict(set)
    for terms in trace.of(LossTerms):
        divisors[terms.version].add(terms.divisor)
    why = ""
    if trace.manifest.mesh is not None and trace.manifest.mesh.cp > 1:
        why = "ranks of context parallelism have parts of a sequence"
    elif any(len(own) > 1 for own in divisors.values()):
        why = "ranks tell other divisors of one loss"
    elif any(len(own) > 1 for own in batches.values()):
        kinds = (*kinds, PolicyColumns, Advantages, Drops, SamplingAsked)
        why = "ranks have other rollouts under the same ids: give `rollouts` ids that no other rank has"
    if why:
        yield from ((kind_of(kind), why) for kind in kinds)


def _told(trace: Trace) -> Iterator[str]:
    """Parts of records that a loop need not fill in, and did."""
    asked = list(trace.of(SamplingAsked))
    if asked and not any(item.filtered for item in asked):
        yield "all answers"
    if any(item.batch_size and item.group_size for item in asked):
        yield "sizes"
    if any(item.max_answer_tokens for item in asked):
        yield "ends"
    if any(any(map(len, item.stops)) for item in trace.of(SampledTokens)):
        yield "finish reasons"
    if any(item.kl_weight for item in trace.of(Advantages)):
        yield "penalties"
    if any(any(map(len, item.weights)) for item in trace.of(RequestSeeds)):
        yield "engine versions"
    if any(_is_read_again(item) for item in trace.of(GivenRewards)):
        yield "gold answers"
    if any(own.size and np.isfinite(own).all() for own in (trace.array(row, "entropy") for row in trace.of(LossRows))):
        yield "entropies"
    names = Counter((item.version, item.name) for item in trace.of(PackedBatchDigest))
    if any(count > 1 for count in names.values()):
        yield "peers"
    if {item.version for item in trace.of(SavedCheckpoint)} & {*trace.versions(ExportedTensor)}:
        yield "saved export"
    by_rank: dict[int, dict[int, set[str]]] = {}
    for item in trace.of(ExportedTensor):
        by_rank.setdefault(item.version, {}).setdefault(item.rank, set()).add(item.name)
    if all(len({frozenset(names) for names in ranks.values()}) == 1 for ranks in by_rank.values()):
        yield "whole exports"
    seeds = Counter(
        (item.version, prompt, seed, temperature)
        for item in trace.of(SampledTokens)
        for prompt, seed, temperature in zip(item.prompts, item.seeds, item.temperatures, strict=False)
        if seed is not None and temperature
    )
    if any(count > 1 for count in seeds.values()):
        yield "repeated seeds"


def _is_read_again(item: GivenRewards) -> bool:
    """Tell whether a second reader knows the reward of an answer: by its name, or 0 and 1 for a number."""
    known = [gold for text, gold in zip(item.texts, item.answers, strict=True) if text is not None and gold is not None]
    numbers = any(gold.strip().lstrip("-").isdigit() for gold in known)
    return bool(known) if item.reward == "answer" else not item.reward and {*item.rewards} <= {0.0, 1.0} and numbers
