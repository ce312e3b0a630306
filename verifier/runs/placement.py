"""GPUs of trainer and engine, and the transport of weights between them."""

from __future__ import annotations

import os
from dataclasses import dataclass

from verifier.config import RoundtripConfig
from verifier.errors import UsageError
from verifier.mesh import Mesh


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """GPUs and transport of a round trip."""

    transport: str
    """Transport of weights to the engine: "gloo", "nccl" or "ipc"."""
    trainer_gpus: int = 0
    """Number of the host's first GPUs that the trainer's ranks take, in turn; 0 without GPUs."""
    engine_gpus: str = ""
    """The engine's CUDA_VISIBLE_DEVICES."""


def place(config: RoundtripConfig, tier: str) -> Placement:
    """Place trainer and engine: by NCCL the engine has GPUs of its own, else it shares the trainer's first ones.

    A trainer of more ranks than it has GPUs shares them. Unless told otherwise, NCCL is taken where nobody need share.

    Raises:
        UsageError: this machine has no GPUs, or too few, for what was asked.
    """
    if tier == "cpu" or config.engine.kind == "hf":
        if config.transport not in (None, "gloo"):
            raise UsageError(
                f"--transport {config.transport} needs GPUs and torch sees none: leave it out"
                if tier == "cpu"
                else f"--engine hf runs on the CPU, and --transport is {config.transport}: leave it out"
            )
        return Placement(transport="gloo", trainer_gpus=place_trainer(config.mesh, tier))
    import torch

    ranks, found = config.mesh.world_size, torch.cuda.device_count()
    transport = config.transport or ("nccl" if ranks + config.engine.tp <= found else "ipc")
    if transport == "nccl" and config.engine.tp >= found:
        raise UsageError(
            f"--transport nccl needs {config.engine.tp} GPUs for the engine and one or more for the trainer, and this "
            f"host has {found}: use --transport ipc"
        )
    trainer = min(ranks, found - config.engine.tp if transport == "nccl" else found)
    if transport != "nccl" and config.engine.tp > trainer:
        raise UsageError(
            f"--engine-tp {config.engine.tp} does not fit on the trainer's {trainer} GPUs: make it smaller, use a "
            f"larger mesh, or --transport nccl with {trainer + config.engine.tp} GPUs"
        )
    first = trainer if transport == "nccl" else 0
    return Placement(
        transport=transport, trainer_gpus=trainer, engine_gpus=_visible(range(first, first + config.engine.tp))
    )


def place_trainer(mesh: Mesh, tier: str) -> int:
    """Number of the host's GPUs that the ranks of a trainer without an engine take; 0 without GPUs."""
    if tier == "cpu":
        return 0
    import torch

    return min(mesh.world_size, torch.cuda.device_count())


def _visible(places: range) -> str:
    given = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in given.split(",")] if given else None
    return ",".join(names[place] if names else str(place) for place in places)
