"""Orders for each process of a run, derived from the config: the ranks' `RunSpec`, the engine's config."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgspec

from verifier.config import GoldenConfig, RoundtripConfig
from verifier.engine.api import EngineConfig
from verifier.platform import Tier
from verifier.platform.upstream_fixes import selected
from verifier.runs.model_under_test import MAX_MODEL_LEN, ModelUnderTest
from verifier.runs.placement import Placement
from verifier.runs.run_manifest import judges_gradients
from verifier.runs.workload import Workload

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

    config: GoldenConfig | RoundtripConfig
    """Config of the command that the user called."""
    program: str
    """"golden", "roundtrip", or "tokens": the token path alone, without export and engine."""
    checkpoint: str
    tier: Tier
    trace: str
    """Trace directory, which the parent has created: of several sessions each has its own."""
    work: str
    """Existing directory for what processes hand to each other: live shards, gradients, exported checkpoints."""
    within: Sequence[str] = ()
    """"package.module:function" and its further arguments: a context manager, entered around the session."""
    workload: Workload | None = None
    """Rollouts to score and train on, and prompts; None for golden."""
    gradients: bool = False
    """Hand each step's gradients to the oracle."""
    chunk_bytes: int = CHUNK_BYTES
    engine_socket: str | None = None
    """None where no engine takes part."""
    engine_ranks: int = 0
    transport: str = "gloo"
    """Weight transport to the engine, as this machine's GPUs allow: "gloo", "nccl" or "ipc"."""
    num_gpus: int = 0
    """GPUs of the host that the ranks take, in turn; 0: all."""
    restore_first: bool = False
    """Send version 0 to the engine before anything else, so that it holds what this run expects of it."""
    saves: bool = False
    """Have megatron-bridge write the last export to files too, and record what a reader finds there."""
    source_from_manifest: bool = False
    """The expected tensors are recorded elsewhere, so the source is not digested."""
    deadline_s: float = 180.0
    """Seconds that rank 0 waits for the engine."""

    @property
    def fixes(self) -> list[str]:
        """Ids of the upstream fixes that the ranks install, `all` spelled out."""
        return sorted(selected(self.config.fixes))

    @property
    def roundtrip(self) -> RoundtripConfig:
        """Config of a round trip, which this run is."""
        assert isinstance(self.config, RoundtripConfig)
        return self.config

    @property
    def lora_rank(self) -> int:
        """Rank of the adapter that is trained on a frozen base; 0 without one."""
        return self.config.engine.lora_rank if isinstance(self.config, RoundtripConfig) else 0

    @property
    def cycles(self) -> int:
        """Updates, each followed by a sync."""
        return 0 if self.workload is None else len(self.workload.batches)

    def to_json(self) -> dict[str, Any]:
        """Inverse of `from_json`."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {**values, "config": self.config.to_dict(), "workload": msgspec.to_builtins(self.workload)}

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RunSpec:
        """Rebuild a spec that was sent as JSON."""
        known = {item.name: record[item.name] for item in fields(cls)}
        kind = GoldenConfig if record["program"] == "golden" else RoundtripConfig
        config = kind.from_dict({**record["config"], "trace": record["trace"]})
        workload = msgspec.convert(record["workload"], Workload | None)
        return cls(**{**known, "config": config, "workload": workload})


def engine_config(config: RoundtripConfig, model: ModelUnderTest, placement: Placement) -> EngineConfig:
    """Config of the engine that takes part, loaded with the source."""
    return EngineConfig(
        **asdict(config.engine), checkpoint=str(model.checkpoint.path), dtype=config.dtype,
        max_model_len=MAX_MODEL_LEN, gpus=placement.engine_gpus, fixes=tuple(sorted(selected(config.fixes))),
    )  # fmt: skip


def roundtrip_spec(
    config: RoundtripConfig, model: ModelUnderTest, placement: Placement, workload: Workload, **session: Any
) -> RunSpec:
    """Spec of one session of a round trip.

    Args:
        config: of the run.
        model: of the run.
        placement: of the run.
        workload: what is scored, sampled and trained on.
        **session: fields that differ from session to session, or from one use of the resources to another.
    """
    return RunSpec(
        config=config, checkpoint=str(model.checkpoint.path), tier=model.tier, workload=workload,
        chunk_bytes=chunk_bytes_for(model.checkpoint.num_bytes, placement.transport),
        transport=placement.transport, num_gpus=placement.trainer_gpus,
        gradients=judges_gradients(config, model), saves=model.is_saved and not config.engine.lora_rank,
        **session,
    )  # fmt: skip


def chunk_bytes_for(total_bytes: int, transport: str) -> int:
    """Buffer size for a model of so many bytes."""
    most = CHUNK_BYTES if transport == "gloo" else GPU_CHUNK_BYTES
    return min(most, max(MIN_CHUNK_BYTES, total_bytes // CHUNKS))
