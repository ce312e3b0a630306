"""Moves of weights: updates must make one; idle steps, scoring and exports must not."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verifier.checks.conditions import ADAPTER, EXPORTS, LAYOUT, NO_ADAPTER, SENT, STEPPED, SYNCED, UPDATED
from verifier.checks.content import Moment, by_name, compare_moments
from verifier.core.check import Comparison, Trace, check, compare_value
from verifier.core.condition import ALWAYS, on, recorded
from verifier.core.record import TensorRecord
from verifier.core.records_weights import (
    ExportedTensor,
    FrozenShard,
    JoinedTensor,
    LiveAdapterMatrix,
    LoadedShard,
    ShardAfterExport,
    ShardAfterIdleStep,
    ShardAfterScoring,
    SourceTensor,
    Update,
    UpdatedShard,
)

OUTWARD = ".lora_B.weight"
"""End of the names of an adapter's outward matrices."""


def _shards(version: int) -> Moment:
    """Moment at which all live weights of a version were recorded."""
    return UpdatedShard if version else LoadedShard, version


@check(
    "WGT007",
    needs=(ShardAfterIdleStep,),
    applies=on(roundtrip=STEPPED & NO_ADAPTER, loop=recorded(ShardAfterIdleStep, LoadedShard)),
)
def idle_step_moved_weight(trace: Trace) -> Iterator[Comparison]:
    """A step with learning rate 0 leaves every live parameter bit alone.

    What it checks: each rank's parameters after an lr = 0 step against those before it.
    Why it matters: an optimizer whose fp32 masters were not refreshed at load writes stale weights back at its first
    step, whatever the gradient is.
    Evidence: load/shard, export/exported (what an export before it left), train/idle, train/shard.
    Tolerance and its source: bitwise; adding zero changes no bit, and a rounded master rounds to the same bits.
    Where to look: the optimizer's master weights and the parameters right after the load.
    What it does not catch: masters that hold the right weights but wrong moments.
    References: SkyRL#2149, RL#2371.
    """
    exported = trace.versions(ShardAfterExport)

    def before(version: int) -> Moment:  # what an export left, whatever it left
        return (ShardAfterExport, version) if version in exported else _shards(version)

    return compare_moments(trace, ShardAfterIdleStep, before, ("the model after an lr = 0 step", "the model before it"))


@check(
    "WGT008", needs=(Update,),
    applies=on(roundtrip=EXPORTS & LAYOUT, loop=recorded(JoinedTensor, ExportedTensor, Update)),
)  # fmt: skip
def update_moved_nothing(trace: Trace) -> Iterator[Comparison]:
    """Every update changes the weights, so that a sync which delivers nothing cannot pass.

    What it checks: at each version above 0, the number of checkpoint tensors whose live bits changed since the version
    before is not zero; for the noise update it is every floating-point tensor, for an adapter every one of its outward
    matrices (B), which are zero before the first step.
    Why it matters: syncing unchanged weights proves nothing about delivery.
    Evidence: train/update, load/source, train/live, train/adapter.
    Tolerance and its source: exact counts.
    Where to look: whether the optimizer stepped, and whether its parameters are the model's.
    What it does not catch: a parameter that should have moved and did not (TRN001).
    References: verl#4248, prime-rl#1145.
    """
    for item in trace.of(Update):
        before, after = (_updated(trace, item.how, version) for version in (item.version - 1, item.version))
        if not after:
            continue
        moved, total = sum(before[name].digest != after[name].digest for name in after if name in before), len(after)
        floats = sum("float" in tensor.dtype for tensor in after.values())
        least = {"step": 1, "noise": floats, "adapter step": total}[item.how]
        sentence = f"the update changed {moved} of the model's {total} tensors, at least {least} had to change"
        right = f"{least} or more"
        yield compare_value(item, item.name, moved, right, same=moved >= least, sentence=sentence, owner="")


def _updated(trace: Trace, how: str, version: int) -> Mapping[str, TensorRecord]:
    """Tensors that an update of a version moves, joined over all ranks."""
    if how == "adapter step":
        matrices = by_name(trace.of(LiveAdapterMatrix, version=version))
        return {name: item for name, item in matrices.items() if name.endswith(OUTWARD)}
    return by_name(trace.of(JoinedTensor if version else SourceTensor, version=version))


@check(
    "WGT009",
    needs=(ShardAfterScoring, LoadedShard),
    applies=on(roundtrip=ALWAYS, loop=recorded(ShardAfterScoring, LoadedShard)),
)
def scoring_moved_weight(trace: Trace) -> Iterator[Comparison]:
    """Scoring tokens leaves every live parameter and buffer bit alone.

    What it checks: each rank's parameters and persistent buffers right after a scoring pass against those before it.
    Why it matters: an evaluation that steps the optimizer, or a forward that updates router statistics, trains on what
    it should only measure; the next update hides it.
    Evidence: load/shard, train/shard, train/scored.
    Tolerance and its source: bitwise; a forward pass writes no weight.
    Where to look: what else the evaluation calls: an optimizer step, a hook, a counter.
    What it does not catch: optimizer state that moved without a weight; after every second update the pass comes first,
    and what it moves then is taken for the update's (TRN001).
    References: RL#1012, ms-swift#10154.
    """
    return compare_moments(trace, ShardAfterScoring, _shards, ("the model after scoring", "the model before it"))


@check(
    "WGT010", needs=(LoadedShard, ShardAfterExport),
    applies=on(
        golden=ALWAYS,
        roundtrip=EXPORTS,
        step=SYNCED & ADAPTER,
        answers=SENT & ADAPTER,
        loop=recorded(ShardAfterExport, LoadedShard),
    ),
)  # fmt: skip
def export_moved_weight(trace: Trace) -> Iterator[Comparison]:
    """An export leaves every live parameter and buffer bit alone.

    What it checks: each rank's parameters and persistent buffers right after each export against those before it.
    Why it matters: an export that casts, transposes or merges in place, or takes an adapter out of its base again by
    subtraction, trains on from weights that no optimizer made.
    Evidence: load/shard, train/shard, export/exported.
    Tolerance and its source: bitwise; an export reads.
    Where to look: what the export writes in place: casts, transposes, merged adapters.
    What it does not catch: an export that writes from version 1 on only, where ranks share weights for data or context
    parallelism: their update is complete only once an export or a forward asks for it (TRN001 sees it).
    References: ms-swift#10154, verl#2029, AReaL#1546.
    """
    return compare_moments(trace, ShardAfterExport, _shards, ("the model after the export", "the model before it"))


@check(
    "WGT012", needs=(LoadedShard, FrozenShard),
    applies=on(roundtrip=EXPORTS & ADAPTER & LAYOUT, step=UPDATED & ADAPTER, loop=recorded(FrozenShard, LoadedShard)),
)  # fmt: skip
def frozen_weight_moved(trace: Trace) -> Iterator[Comparison]:
    """No step moves the base of an adapter that is trained.

    What it checks: each rank's parameters and persistent buffers outside of the adapters, after every step, against
    those after load.
    Why it matters: what is synced is the adapter alone, so a norm or a router that was not frozen trains away from the
    base that the engine holds.
    Evidence: load/shard, train/frozen.
    Tolerance and its source: bitwise; no optimizer has them.
    Where to look: what is frozen, and what the optimizer was given.
    What it does not catch: a base that was loaded wrongly (WGT001).
    References: NeMo-RL#2754, ms-swift#10154.
    """
    says = "the base after a step of the adapter", "the base after load"
    return compare_moments(trace, FrozenShard, lambda version: (LoadedShard, 0), says)
