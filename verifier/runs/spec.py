"""Orders for each process of a run, derived from the config: GPUs, the engine's config, the ranks' `RunSpec`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

import msgspec

from verifier.config import GoldenConfig, RoundtripConfig, TrainConfig
from verifier.engine.api import EngineConfig
from verifier.engine.kv_cache import cache_bytes
from verifier.errors import UsageError
from verifier.export.derived import DerivedLayout
from verifier.export.names import ModelLayout, layout_of
from verifier.model.checkpoint import Checkpoint
from verifier.plan.chunk_plan import MAX_CHUNK_BYTES, MAX_GPU_CHUNK_BYTES, chunk_bytes_of
from verifier.platform import Tier
from verifier.platform.upstream_fixes import selected
from verifier.runs.model_under_test import MAX_MODEL_LEN, USUAL_LENGTH, ModelUnderTest
from verifier.runs.resources import COLLECTIVE_DEADLINE_S
from verifier.runs.workload import Workload


def places_of(num_gpus: int) -> list[str]:
    """Names of this machine's GPUs as CUDA_VISIBLE_DEVICES takes them; one empty name where there are none."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    named = [name.strip() for name in given.split(",")] if given else [str(number) for number in range(num_gpus)]
    return named[:num_gpus] if num_gpus else [""]


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """GPUs of trainer and engine, and the transport of weights between them."""

    transport: str = "gloo"
    """Transport of weights to the engine: "gloo", "nccl" or "ipc"."""
    trainer_gpus: int = 0
    """Number of the host's first GPUs that the trainer's ranks take, in turn; 0 without GPUs."""
    engine_gpus: tuple[str, ...] = ("",)
    """CUDA_VISIBLE_DEVICES of each engine; empty without GPUs."""


def place(config: GoldenConfig | RoundtripConfig | TrainConfig, tier: Tier, ranks: int | None = None) -> Placement:
    """Place trainer and engines: by NCCL engines have GPUs of their own, else they share the trainer's first ones.

    A trainer of more ranks than it has GPUs shares them. Unless told otherwise, NCCL is taken where nobody need share.
    `ranks` are the trainer's on this host, where engines are; None: all of the mesh.

    Raises:
        UsageError: this machine has no GPUs, or too few, for what was asked.
    """
    ranks, found = config.mesh.world_size if ranks is None else ranks, 0
    replicas = config.engine.replicas if isinstance(config, TrainConfig) else 1
    if tier == "cuda":
        import torch

        found = torch.cuda.device_count()
    if isinstance(config, GoldenConfig):
        return Placement(trainer_gpus=min(ranks, found))
    if tier == "cpu" or config.engine.kind == "hf":
        if config.transport not in (None, "gloo"):
            raise UsageError(
                f"--transport {config.transport} needs GPUs and torch sees none: leave it out"
                if tier == "cpu"
                else f"--engine hf runs on the CPU, and --transport is {config.transport}: leave it out"
            )
        return Placement(trainer_gpus=min(ranks, found), engine_gpus=("",) * replicas)
    engine = config.engine.ranks * replicas
    transport = config.transport or ("nccl" if ranks + engine <= found else "ipc")
    if transport == "nccl" and engine >= found:
        raise UsageError(
            f"--transport nccl needs {engine} GPUs for the engine{'' if replicas == 1 else 's'} and one or more for "
            f"the trainer, and this host has {found}: use --transport ipc"
        )
    if transport == "nccl" and isinstance(config, TrainConfig) and config.engine.sleep_level:
        raise UsageError(
            f"--sleep-level is {config.engine.sleep_level} and the engine has GPUs of its own, on which nobody takes "
            "turns with it: leave it out, or give --transport ipc"
        )
    trainer = min(ranks, found - engine if transport == "nccl" else found)
    if transport != "nccl" and engine > trainer:
        sizes = {"tp": config.engine.tp, "pp": config.engine.pp, "replicas": replicas}
        given = " x ".join(f"engine.{name} {size}" for name, size in sizes.items() if size > 1) or "the engine"
        raise UsageError(
            f"{given} takes {engine} GPUs, and the trainer has {trainer}: make it smaller, use a larger mesh, or "
            f"--transport nccl with {trainer + engine} GPUs"
        )
    names = places_of(found)
    first = trainer if transport == "nccl" else 0
    places = [range(at, at + engine // replicas) for at in range(first, first + engine, engine // replicas)]
    visible = tuple(",".join(names[place] for place in own) for own in places)
    return Placement(transport=transport, trainer_gpus=trainer, engine_gpus=visible)


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSpec:
    """Orders that the ranks of every run get; JSON there and back."""

    config: GoldenConfig | RoundtripConfig | TrainConfig
    checkpoint: str
    """Hugging Face checkpoint of version 0."""
    tier: Tier
    layout: Mapping[str, Any] | None = None
    """The layout that was derived for a model without a row, as `DerivedLayout.to_json` gives it."""
    within: Sequence[str] = ()
    """"package.module:function" and its further arguments: a context manager, entered around the rank's work."""
    deadline_s: float = COLLECTIVE_DEADLINE_S
    """Seconds that a rank waits for others, and rank 0 for the engine."""

    @property
    def fixes(self) -> list[str]:
        """Ids of the upstream fixes that the ranks install, `all` spelled out."""
        return sorted(selected(self.config.fixes))

    def layout_for(self, source: Checkpoint) -> ModelLayout | DerivedLayout | None:
        """Layout of the family of the opened checkpoint, else the derived one; None where there is neither."""
        return layout_of(source.config) or (None if self.layout is None else DerivedLayout.from_json(self.layout))

    def to_json(self) -> dict[str, Any]:
        """Inverse of the `from_json` of the spec's class."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        found: dict[str, Any] = msgspec.to_builtins({**values, "config": self.config.to_dict()})
        return found


def told_of(model: ModelUnderTest) -> dict[str, Any]:
    """Fields of `RankSpec` on a model."""
    layout = None if model.derived is None else model.derived.to_json()
    return {"checkpoint": str(model.checkpoint.path), "tier": model.tier, "layout": layout}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSpec(RankSpec):
    """One session of a recipe."""

    config: GoldenConfig | RoundtripConfig
    recipe: str = "roundtrip"
    """Method of `session_megatron.Session` that is the session."""
    trace: str
    """Trace directory, which the parent has created: of several sessions each has its own."""
    work: str
    """Existing directory for what processes hand to each other: live shards, gradients, exported checkpoints."""
    workload: Workload | None = None
    """Rollouts to score and train on, and prompts; None for golden."""
    gradients: bool = False
    """Hand each step's gradients to the oracle."""
    chunk_bytes: int = MAX_CHUNK_BYTES
    engine_socket: str | None = None
    """None where no engine takes part: of a round trip the token path alone is left, without export."""
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
    def exports(self) -> bool:
        """True unless the token path alone is run."""
        return self.workload is None or self.engine_socket is not None

    @property
    def cycles(self) -> int:
        """Updates, each followed by a sync."""
        return 0 if self.workload is None else len(self.workload.batches)

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> RunSpec:
        """Rebuild a spec that was sent as JSON."""
        kind = RoundtripConfig if "engine" in record["config"] else GoldenConfig
        config = kind.from_dict({**record["config"], "trace": record["trace"]})
        workload = msgspec.convert(record["workload"], Workload | None)
        return cls(**{**record, "config": config, "workload": workload})


def engine_config(config: RoundtripConfig, model: ModelUnderTest, placement: Placement) -> EngineConfig:
    """Config of the engine that takes part, loaded with the source."""
    sizes, most = model.checkpoint.config, max(MAX_MODEL_LEN, config.length + 1)
    return EngineConfig(
        **asdict(config.engine), checkpoint=str(model.checkpoint.path), dtype=config.dtype, max_model_len=most,
        kv_cache_bytes=cache_bytes(None, sizes, dtype=config.dtype, engine=config.engine, length=most, count=1),
        max_batch_tokens=0 if config.length <= USUAL_LENGTH else 4 * config.length,  # none of several prompts is cut
        gpus=placement.engine_gpus[0], fixes=tuple(sorted(selected(config.fixes))),
    )  # fmt: skip


def run_spec(
    config: GoldenConfig | RoundtripConfig, model: ModelUnderTest, placement: Placement, **session: Any
) -> RunSpec:
    """Spec of one session; `session` is what differs from session to session, or between uses of the resources."""
    most = MAX_CHUNK_BYTES if placement.transport == "gloo" else MAX_GPU_CHUNK_BYTES
    return RunSpec(
        **told_of(model), config=config,
        chunk_bytes=chunk_bytes_of(model.checkpoint.num_bytes, most),
        transport=placement.transport, num_gpus=placement.trainer_gpus, gradients=model.judges_cycles,
        saves=model.is_saved, **session,
    )  # fmt: skip
