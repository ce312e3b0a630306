"""Layers of experts by the names that vLLM's versions have for them, and what their CPU kernels do to the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from vllm import _custom_ops as ops
from vllm.model_executor.layers import fused_moe

from verifier.errors import ContractError

LAYER: Any = getattr(fused_moe, "FusedMoE", None) or fused_moe.RoutedExperts
"""Class of the modules that hold experts; later than vLLM 0.22, they are children of what a model's names name."""
CHILD = ".routed_experts"
"""End of the path of such a child."""


def packer(module: nn.Module) -> Callable[[torch.Tensor], torch.Tensor] | None:
    """Packing that a CPU kernel does to the weights of all experts; None where it leaves them as they are.

    Raises:
        ContractError: it also pads them.
    """
    method = getattr(module, "quant_method", None)
    kernel = getattr(method, "cpu_fused_moe", None)
    if type(kernel).__name__ == "SGLFusedMOE":
        return torch.ops._C.convert_weight_packed
    if getattr(getattr(kernel, "forward_method", None), "__name__", "") == "forward_grouped_gemm":
        return partial(ops.cpu_prepack_moe_weight, isa=kernel.isa)
    kernel = getattr(getattr(method, "moe_kernel", None), "fused_experts", None)  # vLLM 0.32
    if type(kernel).__module__.endswith(".cpu_moe"):
        if kernel._padded_intermediate_size(kernel.moe_config) != kernel.moe_config.intermediate_size_per_partition:
            raise ContractError(f"{type(kernel).__name__} pads experts, so their weights cannot be read back")
        return partial(ops.cpu_prepack_moe_weight, isa=kernel.isa)
    return None
