"""Orders for each process of a run, derived from the config: the ranks' `RunSpec`, the engine's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from verifier.config import RoundtripConfig
from verifier.engine.api import EngineConfig
from verifier.mesh import Mesh
from verifier.platform.upstream_fixes import selected
from verifier.runs.manifest import judges_gradients
from verifier.runs.model_under_test import MAX_MODEL_LEN, ModelUnderTest
from verifier.runs.placement import Placement
from verifier.runs.scenario import Scenario

CHUNK_BYTES = 64 << 20
"""Largest buffer of a transfer from host to host."""
GPU_CHUNK_BYTES = 1 << 30
"""Largest buffer between GPUs: what is said about a chunk takes less time than its bytes (docs/adr/0010)."""
MIN_CHUNK_BYTES = 64 << 10
CHUNKS = 8
"""A model of less than this many full buffers is sent in smaller ones, so that every transfer has several chunks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec:
    """One session of the trainer's ranks; JSON there and back."""

    program: str
    """"golden", "roundtrip", or "tokens": the token path alone, without export and engine."""
    checkpoint: str
    mesh: Mesh
    dtype: str
    tier: str
    trace: str
    """Trace directory, which the parent has created."""
    work: str
    """Existing directory for what processes hand to each other: live shards, gradients, exported checkpoints."""
    within: Sequence[str] = ()
    """"package.module:function" and its further arguments: a context manager, entered around the session."""
    scenario: Scenario = field(default_factory=Scenario)
    update: str = "step"
    """"step": a real optimizer step; "noise": every tensor moved by seeded noise."""
    gradients: bool = False
    """Hand each step's gradients to the oracle."""
    chunk_bytes: int = CHUNK_BYTES
    engine_socket: str | None = None
    """None where no engine takes part."""
    engine_ranks: int = 0
    transport: str = "gloo"
    """Weight transport to the engine: "gloo", "nccl" or "ipc"."""
    num_gpus: int = 0
    """GPUs of the host that the ranks take, in turn; 0: all."""
    sleep_level: int = 0
    """Level at which the engine sleeps while the trainer steps; 0: it stays awake."""
    lora_rank: int = 0
    """Above 0: train an adapter of this rank on a frozen base."""
    restore_first: bool = False
    """Send version 0 to the engine before anything else, so that it holds what this run expects of it."""
    saves: bool = False
    """Have megatron-bridge write the last export to files too, and record what a reader finds there."""
    source_from_manifest: bool = False
    """The expected tensors are recorded elsewhere, so the source is not digested."""
    fixes: Sequence[str] = ()
    """Ids of the upstream fixes that the ranks install."""
    seed: int = 0
    deadline_s: float = 180.0
    """Seconds that rank 0 waits for the engine."""

    @property
    def cycles(self) -> int:
        """Updates, each followed by a sync."""
        return len(self.scenario.batches)

    def to_json(self) -> dict[str, Any]:
        """Inverse of `from_json`."""
        return {**asdict(self), "mesh": self.mesh.to_dict()}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RunSpec:
        """Rebuild a spec that was sent as JSON."""
        known = {item.name: record[item.name] for item in fields(cls)}
        return cls(**{**known, "mesh": Mesh(**record["mesh"]), "scenario": Scenario(**record["scenario"])})


def engine_config(config: RoundtripConfig, model: ModelUnderTest, placement: Placement) -> EngineConfig:
    """Config of the engine that takes part, loaded with the source."""
    return EngineConfig(
        kind=config.engine.kind, checkpoint=str(model.checkpoint.path), dtype=config.dtype, tp=config.engine.tp,
        max_model_len=MAX_MODEL_LEN, gpus=placement.engine_gpus,
        cuda_graphs=config.engine.cuda_graphs, sleep_mode=config.engine.sleep_level > 0,
        quantization=config.engine.quantization,
        lora_rank=config.engine.lora_rank, fixes=tuple(sorted(selected(config.fixes))),
    )  # fmt: skip


def roundtrip_spec(
    config: RoundtripConfig, model: ModelUnderTest, placement: Placement, scenario: Scenario, **session: Any
) -> RunSpec:
    """Spec of one session of a round trip.

    Args:
        config: of the run.
        model: of the run.
        placement: of the run.
        scenario: what is scored, sampled and trained on.
        **session: fields that differ from session to session, or from one use of the resources to another.
    """
    return RunSpec(
        checkpoint=str(model.checkpoint.path), mesh=config.mesh, dtype=config.dtype, tier=model.tier,
        scenario=scenario, update=config.update, seed=config.seed,
        chunk_bytes=chunk_bytes_for(model.checkpoint.num_bytes, placement.transport),
        transport=placement.transport, num_gpus=placement.trainer_gpus, sleep_level=config.engine.sleep_level,
        lora_rank=config.engine.lora_rank, gradients=judges_gradients(config, model),
        saves=model.is_saved and not config.engine.lora_rank, fixes=sorted(selected(config.fixes)),
        **session,
    )  # fmt: skip


def chunk_bytes_for(total_bytes: int, transport: str) -> int:
    """Buffer size for a model of so many bytes."""
    most = CHUNK_BYTES if transport == "gloo" else GPU_CHUNK_BYTES
    return min(most, max(MIN_CHUNK_BYTES, total_bytes // CHUNKS))
