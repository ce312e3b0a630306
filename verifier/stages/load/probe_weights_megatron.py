"""Probes of the trainer side: live shards, what they must hold, the export stream, the plan.

A probe only looks: it digests what passes and hands it on as it was.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from verifier.core.record import Probe, real
from verifier.export.live_weights import LiveWeights
from verifier.model.checkpoint import Checkpoint
from verifier.plan.chunk_plan import ChunkPlan
from verifier.plan.digest import described, digest_tensors
from verifier.stages.export.probe_tensors import record_tensors
from verifier.stages.export.records import ExportedAdapterMatrix, ExportedAdapterScaling
from verifier.stages.load.records import ExpectedShard, ShardRecord
from verifier.stages.plan.records import PlanDigest, PlannedTensor
from verifier.train.lora_megatron import further_settings, read_adapter

if TYPE_CHECKING:
    pass


def record_live(probe: Probe, live: LiveWeights, version: int, *kinds: type[ShardRecord]) -> None:
    """Digest every live tensor, recorded as each of `kinds`; the device is waited for once, not for each tensor."""
    found = list(live.tensors())
    digests = digest_tensors(tensor for _, _, tensor in found)
    for (chunk, name, tensor), digest in zip(found, digests, strict=True):
        place = live.places.get((chunk, name))
        for kind in kinds:
            probe.emit(
                kind(
                    name=place.global_name if place else f"{name} (chunk {chunk})", version=version,
                    replica=place.group if place else f"rank {live.rank} {chunk} {name}", coordinate=live.coordinate,
                    **described(tensor, digest),
                )
            )  # fmt: skip


def record_expected(probe: Probe, live: LiveWeights, source: Checkpoint) -> None:
    """Digest, for every placement, what the checkpoint says must be there."""
    for place in live.places.values():
        facts, sources = described(place.shard(source.read)), tuple(place.sources)
        probe.emit(ExpectedShard(name=place.global_name, coordinate=live.coordinate, sources=sources, **facts))


def record_exported_adapter(probe: Probe, path: Path, version: int) -> None:
    """Digest the matrices of an adapter's folder, with its scaling and what else its configuration asks for."""
    found, scaling = read_adapter(path)
    record_tensors(probe, ExportedAdapterMatrix, found.items(), version)
    further = further_settings(path)
    probe.emit(ExportedAdapterScaling(name="alpha / rank", version=version, scaling=real(scaling), further=further))


def record_plan(probe: Probe, plan: ChunkPlan, *, entries: bool) -> None:
    """The plan's digest and, from one rank, its entries."""
    tensors, num_chunks = tuple(plan.tensors), len(plan.chunks)
    probe.emit(PlanDigest(name="chunk plan", digest=plan.digest, num_chunks=num_chunks, num_tensors=len(tensors)))
    for tensor in tensors if entries else ():
        probe.emit(PlannedTensor(name=tensor.name, dtype=tensor.dtype, shape=tuple(tensor.shape)))
