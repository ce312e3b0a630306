"""Adapters on their way to an engine: each version's, by file, or merged into the weights that are sent."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from verifier.checks.conditions import ADAPTER, ADAPTERS_SENT, SENT, SYNCED, WEIGHTS_SENT
from verifier.checks.content import by_name, compare_contents, left_out, times
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.condition import on, recorded
from verifier.core.records_weights import (
    CheckpointView,
    ExportedAdapterMatrix,
    ExportedTensor,
    MergedMatrix,
    SourceTensor,
)
from verifier.core.stage import Stage
from verifier.core.trace import Trace

HALF_STEP = {"float32": 2.0**-24, "bfloat16": 2.0**-8}
"""Greatest relative error of rounding to a dtype."""
SUMMANDS = 3
"""Roundings in float32 besides those of the sum over an adapter's rank: of the factor, its product, and the base."""


@check(
    "TPT004",
    needs=(),
    applies=on(
        step=SYNCED & ADAPTERS_SENT, answers=SENT & ADAPTERS_SENT, loop=recorded(ExportedAdapterMatrix, CheckpointView)
    ),
)
def adapter_not_delivered(trace: Trace) -> Iterator[Comparison]:
    """The adapter of every version was exported, and read back from every engine rank.

    What it checks: of each (version, engine rank), the matrices of that version's export that the rank was asked for
    after the sync, and has.
    Why it matters: an adapter that is delivered once, or behind a flag that is off, leaves the engine with an old
    policy, and looks like staleness.
    Evidence: export/adapter, engine/view.
    Tolerance and its source: exact counts.
    What it does not catch: wrong contents, such as those of the version before (ENG001).
    References: verl#7495.
    """
    for version, rank in product(trace.manifest.synced_versions, range(trace.manifest.engine_ranks)):
        exported = [item.name for item in trace.of(ExportedAdapterMatrix, version=version)]
        held = {item.tensor for item in trace.of(CheckpointView, version=version, rank=rank)}
        want, got = len(exported), sum(name in held for name in exported)
        yield Comparison(
            what=f"version {version}", same=got == want and want > 0, stage=Stage.TRANSPORT, version=version,
            badness=1.0, owner=f"engine rank {rank}",
            sentence=f"engine rank {rank} holds {got} of the {want} matrices of the adapter of version {version}"
            if want else f"the adapter of version {version} was never exported",
            expected=f"{want} matrices" if want else "an exported adapter", actual=f"{got} matrices",
            allowed="exact counts", hint="look at what gates the sync of adapters", absent=got < want or not want,
        )  # fmt: skip


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
    Tolerance and its source: one rounding to the exported dtype, and of a sum of as many float32 numbers as the rank
    and 3 more, each relative to |base| + alpha / rank * |B| |A|; bitwise for what has no adapter, as nothing trains it.
    What it does not catch: an adapter that rounding swallows: `merge_rounding` in the metrics says how much it takes.
    References: NeMo-RL#3696, trl#6688, UniRL#155.
    """
    for item in trace.of(MergedMatrix):
        step = HALF_STEP[item.dtype]
        allowed = 1 + (item.rank_of_adapter + SUMMANDS) * HALF_STEP["float32"] / step
        gap = float(item.gap)
        yield Comparison(
            what=item.name, same=gap <= allowed, stage=Stage.EXPORT, version=item.version, share=times(gap, allowed),
            sentence=f"`{item.name}` is exported up to {gap:.3g} half steps of {item.dtype} from its base and adapter",
            expected="base + alpha / rank * B A (float64, of the live shards)",
            actual=f"off by {gap:.3g} half steps at element {item.where:,}",
            allowed=f"{allowed:.3g} half steps (one rounding, and a sum of {item.rank_of_adapter} numbers)",
            hint="look at the factor of the merge, at its dtype, and at whether it was merged before",
        )  # fmt: skip
    for version in trace.versions(MergedMatrix):
        merged = {item.name for item in trace.of(MergedMatrix, version=version)}
        exported = [item for item in trace.of(ExportedTensor, version=version, rank=0) if item.name not in merged]
        source = by_name(trace.of(SourceTensor))
        copies = left_out(source, exported)
        base = [item for name, item in source.items() if name not in merged and name not in copies]
        yield from compare_contents(
            exported, base if exported else (), stage=Stage.EXPORT, version=version, actual_says="the export",
            expected_says="the source checkpoint, which nothing trains", allowed="bitwise (an export copies)",
            hint="look at what the export casts, caches or gathers beside the matrices that it merges",
        )  # fmt: skip
