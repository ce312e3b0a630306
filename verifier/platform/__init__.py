"""The two tiers, `cpu` (reference modules, gloo) and `cuda` (Transformer Engine, NCCL), with their stand-ins."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path
from typing import Literal, get_args

from verifier.errors import UsageError

Tier = Literal["cpu", "cuda"]
_DRIVER = "libcuda.so.1"
"""CUDA's driver, by the name by which CUDA's runtime loads it."""
FLASHINFER = "flashinfer"
"""flashinfer-python. Asks the GPU for its number of multiprocessors when it is imported (0.6.8.post1)."""
CONVOLUTIONS = "causal_conv1d"
"""causal-conv1d. Its kernels take tensors on a GPU alone."""
CUTLASS = "cutlass"
"""nvidia-cutlass-dsl. Asks the GPU for its compute capability when it is imported (4.4.2)."""
FLA = "fla"
"""flash-linear-attention. Asks the GPU for its name when it is imported (0.4.1); ranks import it with their GPU."""


def select() -> Tier:
    """Return the tier of this machine: `cuda` if torch sees a GPU, else `cpu`.

    Loads torch where there is a driver, 0.25 GB, and starts no CUDA context, so a fork afterwards is safe.
    """
    try:
        ctypes.CDLL(_DRIVER)
    except OSError:  # torch would find no GPU either
        return "cpu"
    import torch

    return "cuda" if torch.cuda.device_count() else "cpu"


def install_for(tier: Tier) -> None:
    """Prepare this process for a tier; call it once, before Megatron is imported.

    Raises:
        UsageError: an unknown tier, a GPU tier without a GPU, an absent package, or an upstream name that has changed.
    """
    if tier == "cpu":
        from verifier.platform.cpu import install
    elif tier == "cuda":
        from verifier.platform.cuda import install
    else:
        raise UsageError(f"unknown tier `{tier}`: one of {', '.join(get_args(Tier))}")
    install()


def leave_out(*packages: str) -> None:
    """Let every later import of these here, and in what is forked from here, raise ModuleNotFoundError.

    Megatron, mamba-ssm and vLLM take that for a package that is not installed, and use kernels of their own (ADR 0056).
    One that was imported before stays.
    """
    for package in packages:
        sys.modules.setdefault(package, None)  # type: ignore[arg-type]


def import_megatron(tier: Tier) -> None:
    """Prepare this process for a tier and import what of Megatron a model's build, passes and training need.

    No CUDA context is started, so a fork afterwards is safe.
    """
    found = importlib.util.find_spec(FLA)
    places = () if found is None else found.submodule_search_locations or ()
    has_kernels = any((Path(place) / "modules" / "convolution.py").exists() for place in places)  # gone in 0.6
    leave_out(FLASHINFER, CUTLASS)  # Megatron's own inference and Mamba-3's decoding use them: no rank runs either
    leave_out(FLA)
    install_for(tier)
    from megatron.bridge import AutoBridge  # noqa: F401
    from megatron.core.distributed import finalize_model_grads  # noqa: F401
    from megatron.core.optimizer import get_megatron_optimizer  # noqa: F401
    from megatron.core.pipeline_parallel import get_forward_backward_func  # noqa: F401

    if tier == "cuda" and has_kernels:
        from verifier.platform.cuda import offer_delta_kernels

        offer_delta_kernels(FLA)


def host_bytes() -> int:
    """Return the host's memory, or what its control group may take if that is less, bytes.

    Source:
        sysconf(3); memory.max in Linux's Control Group v2.
    """
    limit = Path("/sys/fs/cgroup/memory.max")
    said = limit.read_text().strip() if limit.is_file() else "max"
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return whole if said == "max" else min(whole, int(said))
