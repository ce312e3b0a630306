"""What test_plan.py runs on ranks."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from verifier.core.record import Record
from verifier.launch.rank import RankContext


class _Kept:
    """A probe that keeps its records."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def emit(self, record: Record, array: Any = None) -> None:
        """Keep one fact."""
        self.records.append(record)


def planned(context: RankContext) -> list[dict[str, Any]]:
    """Load the model on this rank, export it and plan the transfer; the records of live shards and of the plan."""
    from verifier.export import gather_megatron
    from verifier.export.live_weights import LiveWeights
    from verifier.export.names import layout_of
    from verifier.mesh import Mesh
    from verifier.model.checkpoint import open_checkpoint
    from verifier.model.provider_megatron import build
    from verifier.plan.chunk_plan import MAX_CHUNK_BYTES, chunk_bytes_of, plan_of
    from verifier.stages.load.probe_configs_megatron import record_live, record_plan
    from verifier.stages.load.records import LoadedShard

    args, probe = context.args, _Kept()
    mesh, checkpoint = Mesh(**args["mesh"]), open_checkpoint(args["checkpoint"])
    trainer = build(checkpoint.path, mesh, dtype=args["dtype"], tier="cpu", fixes=args["fixes"])
    live = LiveWeights(trainer.chunks, layout_of(checkpoint.config), mesh, context.rank)
    record_live(probe, live, 0, LoadedShard)
    chunk_bytes = chunk_bytes_of(checkpoint.num_bytes, MAX_CHUNK_BYTES)
    record_plan(probe, plan_of(gather_megatron.export(trainer), chunk_bytes), entries=context.rank == 0)
    found: list[dict[str, Any]] = json.loads(msgspec.json.encode(probe.records))
    return [{**record, "rank": context.rank} for record in found]
