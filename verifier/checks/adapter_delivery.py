"""Adapters that are merged into the weights that are sent to an engine."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.checks.conditions import ADAPTER, SYNCED, WEIGHTS_SENT
from verifier.checks.content import by_name, compare_contents, left_out
from verifier.core.check import Comparison, Stage, Trace, check, compare_value
from verifier.core.condition import on, recorded
from verifier.core.records_weights import ExportedTensor, MergedMatrix, SourceTensor

HALF_STEP = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Greatest relative error of rounding to a dtype."""
SUMMANDS = 3
"""Roundings in float32 besides those of the sum over an adapter's rank: of the factor, its product, and the base."""


@check(
    "WGT018",
    needs=(MergedMatrix,),
    applies=on(
        step=SYNCED & WEIGHTS_SENT & ADAPTER, export=ADAPTER, loop=recorded(MergedMatrix, ExportedTensor, SourceTensor)
    ),
)
def merged_matrix_wrong(trace: Trace) -> Iterator[Comparison]:
    """A matrix that is exported with its adapter added is base + alpha / rank * B A, rounded once; all others are base.

    What it checks: each such matrix against the product in float64 of the live shards, joined without megatron-bridge
    (`verifier/export/adapters.py`), and the source checkpoint's base. Every other tensor of a sync against the source:
    names both ways, dtypes, shapes and bits.
    Why it matters: a merge that scales by another factor, adds the adapter twice, or adds it in bf16, samples from
    another policy, by too little to see in rewards.
    Evidence: export/merged, export/tensor of trainer rank 0, load/source.
    Tolerance and its source: bitwise for what has no adapter, as nothing trains it. Of a merged matrix one rounding to
    the exported dtype, and of a sum of as many float32 numbers as the rank and 3 more, each relative to |base| + alpha
    / rank * |B| |A|.
    Where to look: the factor of the merge, its dtype, and what was merged, cast, cached or gathered before.
    What it does not catch: an adapter that rounding swallows: `merge_rounding` in the metrics says how much it takes.
    References: NeMo-RL#3696, trl#6688, UniRL#155.
    """
    for item in trace.of(MergedMatrix):
        step = HALF_STEP[item.dtype]
        allowed = 1 + (item.rank_of_adapter + SUMMANDS) * HALF_STEP["float32"] / step
        gap = float(item.gap)
        subject = f"`{item.name}`, in half steps of {item.dtype} from its base and adapter at element {item.where:,},"
        says = "the export", "base + alpha / rank * B A, float64, of the live shards"
        words = f"{allowed:.3g} half steps (one rounding, and a sum of {item.rank_of_adapter} numbers)"
        yield compare_value(item, item.name, gap, None, subject=subject, says=says, allowed=words, bound=allowed)
    for version in trace.versions(MergedMatrix):
        merged = {item.name for item in trace.of(MergedMatrix, version=version)}
        exported = [item for item in trace.of(ExportedTensor, version=version, rank=0) if item.name not in merged]
        source = by_name(trace.of(SourceTensor))
        copies = left_out(source, exported)
        base = [item for name, item in source.items() if name not in merged and name not in copies]
        says = "the export", "the source checkpoint, which nothing trains"
        yield from compare_contents(exported, base if exported else (), says, Stage.EXPORT, version)
