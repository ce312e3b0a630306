"""Layers of experts by the names that vLLM's versions have for them, and what their CPU kernels do to the weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
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
CPU_KERNELS = tuple(
    f"vllm.model_executor.layers.fused_moe.cpu_fused_moe:CPUFusedMOE.{name}"
    for name in ("forward_grouped_gemm", "forward_torch")
)
"""Passes of vLLM 0.21's CPU experts."""
KERNEL_TAKES = "self layer input topk_weights topk_ids activation global_num_experts skip_weighted"


def of_rank(run: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Return a pass over the experts of a rank alone, where it has not all of them.

    vLLM 0.21's own takes the choices of the whole model as places among them, and reads beyond the weights (vllm
    #57837). Here each choice of one of this rank's experts is a token of its own, and the others count zero.
    """

    @wraps(run)
    def run_own(
        self: Any, layer: Any, x: torch.Tensor, topk_weights: torch.Tensor, topk_ids: torch.Tensor, *more: Any
    ) -> torch.Tensor:
        if layer.expert_map is None:
            return run(self, layer, x, topk_weights, topk_ids, *more)
        activation, _, *skip = more
        places = layer.expert_map[topk_ids.long()]
        own = places >= 0
        tokens, output = own.nonzero(as_tuple=True)[0], torch.zeros_like(x, dtype=torch.float32)
        if len(tokens):
            chosen = topk_weights[own].unsqueeze(1), places[own].unsqueeze(1).to(topk_ids.dtype)
            found = run(self, layer, x[tokens], *chosen, activation, layer.local_num_experts, *skip)
            output.index_add_(0, tokens, found.float())
        return output.to(x.dtype)

    return run_own


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
