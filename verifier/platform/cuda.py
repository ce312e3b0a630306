"""The GPU tier: checks that all is there and sets this process's device; nothing is replaced."""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
from pathlib import Path
from typing import Any

from verifier.errors import InternalError, UsageError
from verifier.platform.patch import Patch, apply
from verifier.platform.provenance import TRAINER, require_installed

_CUDA_NOT_STARTED = 3
"""Value of CUDA_ERROR_NOT_INITIALIZED."""
_DELTA_KERNELS = {
    "modules.convolution": "causal_conv1d", "modules.l2norm": "l2norm",
    "ops.gated_delta_rule": "chunk_gated_delta_rule",
}  # fmt: skip
"""Module of flash-linear-attention -> function of it that megatron-core calls."""
_DELTA_NETS = tuple(f"megatron.core.ssm.gated_delta_net.{name}" for name in ("common", "gdn"))
"""Modules that look up flash-linear-attention's functions."""
LOCAL_RANK = "LOCAL_RANK"
"""Environment variable with this process's GPU number, as torchrun sets it."""


def install() -> None:
    """Make this process a GPU-tier process.

    Raises:
        UsageError: torch sees no GPU, or a package is absent.
    """
    import torch

    if not torch.cuda.device_count():
        raise UsageError("the gpu tier needs a GPU and torch sees none")
    require_installed(*TRAINER, "transformer-engine")
    # Packed micro-batches differ in length, and fused element-wise functions would be compiled for each.
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
    # Otherwise mamba-ssm times kernel variants, and its choice varies with the machine.
    os.environ.setdefault("MAMBA_DETERMINISTIC", "1")
    # Transformer Engine's products of float32 are in TF32, 10 bits, unless cuBLAS is told otherwise before it starts.
    os.environ.setdefault("NVIDIA_TF32_OVERRIDE", "0")
    # A program that uses NVLink multicast can put GPUs that other programs use out of service.
    os.environ.update(NCCL_NVLS_ENABLE="0", TORCH_SYMM_MEM_DISABLE_MULTICAST="1")
    # Megatron's overlap of collectives with compute needs one hardware queue, set before CUDA starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if LOCAL_RANK in os.environ:
        torch.cuda.set_device(int(os.environ[LOCAL_RANK]))


def offer_delta_kernels(package: str) -> None:
    """Let gated delta nets call flash-linear-attention, which is imported when a rank first calls it."""
    for module, function in _DELTA_KERNELS.items():

        def called(*args: Any, module: str = module, function: str = function, **kwargs: Any) -> Any:
            if sys.modules.get(package, ...) is None:
                del sys.modules[package]
            return getattr(importlib.import_module(f"{package}.{module}"), function)(*args, **kwargs)

        for place in _DELTA_NETS:
            if hasattr(importlib.import_module(place), function):
                apply([Patch(f"{place}:{function}", called)])
    apply([Patch(f"{_DELTA_NETS[0]}:HAVE_FLA", True)])


def another_cudnn() -> str:
    """Return a sentence if Transformer Engine runs another cuDNN than torch was built against; empty otherwise.

    Transformer Engine prefers a cuDNN in the system's folders to the one installed with torch.
    """
    import torch
    from transformer_engine.pytorch.utils import get_cudnn_version

    runs, built = tuple(get_cudnn_version()), tuple(torch._C._cudnn.getCompileVersion())
    if runs == built:
        return ""
    own = Path(torch.__file__).parents[1] / "nvidia" / "cudnn"
    return (
        f"Transformer Engine runs cuDNN {'.'.join(map(str, runs))}, torch was built against "
        f"{'.'.join(map(str, built))}: to use that one, set CUDNN_HOME={own} and put {own / 'lib'} first on "
        "LD_LIBRARY_PATH"
    )


def require_not_started() -> None:
    """Refuse to fork from a process that has started CUDA: no forked rank could use a GPU.

    Raises:
        InternalError: an import has started the driver.
    """
    if ctypes.CDLL("libcuda.so.1").cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != _CUDA_NOT_STARTED:
        raise InternalError("an import has started CUDA in the process that ranks are forked from")
