"""Evidence of an export on one rank: its shards by the exported tensors, what should be written, what is in files."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from verifier.core.record import Probe
from verifier.export.live_weights import LiveWeights
from verifier.megatron.step_megatron import params_synced
from verifier.plan.digest import described
from verifier.probes.training.kept_records import Kept
from verifier.stages.export.probe_tensors import IndexedFiles, merged_matrix, record_saved, source_tensors
from verifier.stages.export.records import ExportedShard, WrittenShard
from verifier.stages.load.probe_configs_megatron import record_config, record_exported_adapter, record_live
from verifier.stages.train.records import UpdatedShard
from verifier.trainer.merge_rounding import MergeRounding
from verifier.trainer.observer import RankParts

if TYPE_CHECKING:
    import torch

    from verifier.export.sharding import ParamPlacement
    from verifier.probes.training.rank_evidence_megatron import RankEvidence


def record_live_weights(rank: RankEvidence, probe: Probe, version: int) -> Mapping[str, torch.Tensor]:
    """Record what should be written; return the matrices of adapters, on rank 0. A collective."""
    if rank.adapters is not None:
        return rank.adapters.record_matrices(probe, version)
    if not rank.has_left:
        rank.left = Kept()
        with params_synced(rank.parts.trainer):
            record_live(rank.left, rank.parts.whole, version, UpdatedShard)
    rank.left.record(probe, version=version)
    return {}


def record_files(
    parts: RankParts, probe: Probe, version: int, folder: Path, adapter: Path, matrices: Mapping[str, torch.Tensor]
) -> None:
    """Record what a reader finds in the files: of all tensors on rank 0, and of its own shards on each rank."""
    files, adapters = IndexedFiles(folder), parts.adapters
    if parts.rank == 0:
        if adapters is not None:
            record_exported_adapter(probe, adapter, version)
        record_config(probe, parts.source, folder, version)
        record_saved(probe, files, version)
        described_by_layout = parts.whole.described()
        for item in source_tensors(parts.source):
            if item.name in files.names or not described_by_layout or item.name in described_by_layout:
                probe.emit(item)
    if adapters is not None and parts.rank == 0:
        rounding = MergeRounding(parts.source, matrices, adapters.lora)
        for name in sorted(files.names):
            if (gap := rounding.add(name, files.read(name))) is not None:
                probe.emit(merged_matrix(name, gap, version))
    for place in parts.whole.places.values() if adapters is None else ():
        if all(name in files.names for name in place.sources):
            shapes = {name: tuple(files.read(name).shape) for name in place.sources}
            if shapes != {name: tuple(place.source_shapes[name]) for name in place.sources}:
                continue  # the comparison with the source names it
            facts, at = described(place.shard(files.read)), parts.whole.coordinate
            probe.emit(WrittenShard(name=place.global_name, version=version, coordinate=at, **facts))


def cut(
    probe: Probe, live: LiveWeights, stream: Iterable[tuple[str, torch.Tensor]], version: int
) -> Iterator[tuple[str, torch.Tensor]]:
    """The export stream, of which each live shard is cut as soon as the last of its sources has passed.

    Sources are copied to the host until then, so that the stream may write over them. A shard of which one never comes,
    or comes in another shape, is not cut: names and shapes of the stream are compared elsewhere.

    Args:
        probe: this rank's recorder.
        live: weights of this rank, of a model with a layout; no adapters.
        stream: (checkpoint name, tensor).
        version: of the weights.
    """
    waiting: dict[str, list[ParamPlacement]] = defaultdict(list)
    for place in live.places.values():
        for name in place.sources:
            waiting[name].append(place)
    uses = {name: len(places) for name, places in waiting.items()}
    held: dict[str, torch.Tensor] = {}
    for name, tensor in stream:
        yield name, tensor
        if name in waiting:
            held[name] = tensor.detach().to("cpu", copy=True)
        for place in waiting.pop(name, ()):
            if all(source in held for source in place.sources):
                _record(probe, live, place, held, version)
                for source in place.sources:
                    uses[source] -= 1
                    if not uses[source]:
                        del held[source]


def _record(
    probe: Probe, live: LiveWeights, place: ParamPlacement, held: dict[str, torch.Tensor], version: int
) -> None:
    if any(tuple(held[name].shape) != tuple(place.source_shapes[name]) for name in place.sources):
        return
    facts = described(place.shard(held.__getitem__))
    probe.emit(ExportedShard(name=place.global_name, version=version, coordinate=live.coordinate, **facts))
