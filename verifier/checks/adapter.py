"""Runs that train an adapter: the base is frozen, and the adapter is what is exported."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.checks.content import by_name, compare_contents, compare_moments
from verifier.core.check import check
from verifier.core.comparison import Comparison
from verifier.core.records_weights import (
    ExportedAdapterMatrix,
    ExportedAdapterScaling,
    FrozenShard,
    LiveAdapterMatrix,
    LiveAdapterScaling,
    LoadedShard,
)
from verifier.core.stage import Stage
from verifier.core.trace import Trace


@check("WGT012", needs=(LoadedShard, FrozenShard), scope="adapter")
def frozen_weight_moved(trace: Trace) -> Iterator[Comparison]:
    """No step moves the base of an adapter that is trained.

    What it checks: each rank's parameters and persistent buffers outside of the adapters, after every step, against
    those after load.
    Why it matters: what is synced is the adapter alone, so a norm or a router that was not frozen trains away from the
    base that the engine holds.
    Evidence: load/shard, train/frozen.
    Tolerance and its source: bitwise; no optimizer has them.
    What it does not catch: a base that was loaded wrongly (WGT001).
    References: NeMo-RL#2754, ms-swift#10154.
    """
    for version in trace.versions(FrozenShard):
        yield from compare_moments(
            trace, (FrozenShard, version), (LoadedShard, 0),
            actual_says="the base after a step of the adapter", expected_says="the base after load",
            allowed="bitwise (no optimizer has it)", hint="look at what is frozen, and at what the optimizer was given",
        )  # fmt: skip


@check(
    "WGT013",
    needs=(LiveAdapterMatrix, ExportedAdapterMatrix, LiveAdapterScaling, ExportedAdapterScaling),
    scope="adapter",
)
def exported_adapter_differs_from_live(trace: Trace) -> Iterator[Comparison]:
    """The adapter that an engine is given is the one that the trainer's ranks hold.

    What it checks: at each version above 0, names, dtypes, shapes and bits of the matrices in the adapter's file, and
    alpha over rank in its configuration, against the live adapters of all ranks, joined without megatron-bridge
    (`verifier/export/adapters.py`).
    Why it matters: fused linears have one pair of matrices, the published form one for each projection; parts in
    another order have the right shapes, and an adapter is small enough that rewards still move.
    Evidence: train/adapter, export/adapter, train/adapter-scaling, export/adapter-scaling.
    Tolerance and its source: bitwise, the factor to six digits; export copies.
    What it does not catch: an adapter whose effect in the trainer is another one (LGP001).
    References: miles#1792, TensorRT-LLM#8063, vllm#55545.
    """
    for version in trace.versions(LiveAdapterScaling):
        yield from compare_contents(
            by_name(trace.of(ExportedAdapterMatrix, version=version)),
            by_name(trace.of(LiveAdapterMatrix, version=version)),
            stage=Stage.EXPORT, version=version, actual_says="the exported adapter",
            expected_says="the live adapters", allowed="bitwise (export copies)",
            hint="look at how fused adapters are split, and at the axes that shard them",
        )  # fmt: skip
        for live in trace.of(LiveAdapterScaling, version=version):
            exported = next(trace.of(ExportedAdapterScaling, version=version), None)
            want, got = f"{float(live.scaling):g}", f"{float(exported.scaling):g}" if exported else "absent"
            yield Comparison(
                what="alpha / rank", same=got == want, stage=Stage.EXPORT, version=version, badness=1.0,
                sentence=f"the exported adapter is multiplied by {got}, the live ones by {want}",
                expected=f"{want} (the live adapters)", actual=f"{got} (the exported adapter)", allowed="six digits",
                hint="look at alpha and rank in the adapter's configuration", absent=exported is None,
            )  # fmt: skip
