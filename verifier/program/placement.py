"""Which GPUs the engine gets, and how weights reach it there."""

from __future__ import annotations

import os

from verifier.config import RoundtripConfig
from verifier.errors import UsageError


def transport_of(config: RoundtripConfig, tier: str) -> str:
    """How weights reach the engine: "gloo", "nccl" or "ipc".

    Raises:
        UsageError: this machine has no GPUs, or too few, for what was asked.
    """
    if tier == "cpu":
        if config.transport not in (None, "gloo"):
            raise UsageError(f"--transport {config.transport} needs GPUs and torch sees none: leave it out")
        return "gloo"
    if config.engine == "hf":
        if config.transport not in (None, "gloo"):
            raise UsageError(f"--engine hf runs on the CPU, and --transport is {config.transport}: leave it out")
        return "gloo"
    import torch

    world_size, found = config.mesh.world_size, torch.cuda.device_count()
    needed = world_size + config.engine_tp
    transport = config.transport or ("nccl" if needed <= found else "ipc")
    if transport == "nccl" and needed > found:
        raise UsageError(
            f"--transport nccl needs {needed} GPUs, {world_size} for the trainer and {config.engine_tp} for the "
            f"engine, and this host has {found}: use --transport ipc"
        )
    if transport != "nccl" and config.engine_tp > world_size:
        raise UsageError(
            f"--engine-tp {config.engine_tp} does not fit on the trainer's {world_size} GPUs: use a larger mesh, or "
            f"--transport nccl with {needed} GPUs"
        )
    return transport


def engine_gpus(transport: str, config: RoundtripConfig) -> str:
    """The engine's CUDA_VISIBLE_DEVICES: GPUs behind the trainer's for NCCL, else the trainer's first ones."""
    first = config.mesh.world_size if transport == "nccl" else 0
    places = range(first, first + config.engine_tp)
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = [name.strip() for name in visible.split(",")] if visible else None
    return ",".join(names[place] if names else str(place) for place in places)
