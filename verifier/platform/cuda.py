"""The GPU tier: nothing stands in. Only versions are checked and the process is told which device is its own."""

from __future__ import annotations

import os

from verifier.errors import UsageError
from verifier.platform.pins import require_pins

LOCAL_RANK = "LOCAL_RANK"
"""Environment variable that names this process's GPU on its host, as torchrun sets it."""


def install() -> None:
    """Make this process a GPU-tier process.

    Raises:
        UsageError: no GPU, or an installed version is not the pinned one.
    """
    import torch

    if not torch.cuda.device_count():
        raise UsageError("the gpu tier needs a GPU and torch sees none: run with --tier cpu")
    require_pins("torch", "megatron-core", "megatron-bridge", "transformers", "transformer-engine")
    # Megatron's overlap of collectives with compute needs one hardware queue; it must be set before CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if LOCAL_RANK in os.environ:
        torch.cuda.set_device(int(os.environ[LOCAL_RANK]))
