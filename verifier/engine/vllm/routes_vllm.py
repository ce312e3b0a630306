"""Routes of a mixture of experts on vLLM's CPU worker: what it lacks of vLLM's own record of them.

vLLM's CPU experts choose inside of their own function, where no route is written; vLLM 0.21 also copies routes by CUDA
streams. Finding routes by position and request, and giving them out, stay vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe import routed_experts_capturer

from verifier.engine.vllm.experts_vllm import LAYER
from verifier.platform.patch import Patch, apply, current

_CHOICE = "vllm.model_executor.layers.fused_moe.cpu_fused_moe:select_experts"
_CHOICE_TAKES = (
    "hidden_states router_logits top_k use_grouped_topk renormalize topk_group num_expert_group "
    "custom_routing_function scoring_func routed_scaling_factor e_score_correction_bias"
)
_EXPERTS = (
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.apply_monolithic"
)


def record_routes(runner: Any, begin: Callable[[Any], None]) -> None:
    """Have vLLM's CPU model runner report the experts of each token, as its GPU runner does.

    `begin` is upstream's own beginning of the record.

    Raises:
        UsageError: another vLLM, whose experts choose elsewhere.
    """
    keep: Callable[[Any, torch.Tensor], None]
    if hasattr(routed_experts_capturer, "_RoutedExpertsCapturerReal"):
        from verifier.engine.vllm import host_capturer_vllm

        host_capturer_vllm.install(runner)
        keep = host_capturer_vllm.keep
    else:
        begin(runner)
        layers = [module for module in runner.model.modules() if isinstance(module, LAYER)]
        keep = partial(_capture, runner.routed_experts_capturer, {id(layer): at for at, layer in enumerate(layers)})
    choose: Callable[..., Any] = current(_CHOICE)
    run_experts: Callable[..., Any] = current(_EXPERTS)
    running: list[Any] = []

    def experts_of_layer(self: Any, layer: Any, *inputs: Any, **named: Any) -> Any:
        running.append(layer)
        try:
            return run_experts(self, layer, *inputs, **named)
        finally:
            running.pop()

    def chosen(*inputs: Any, **named: Any) -> Any:
        weights, experts_TK = choose(*inputs, **named)
        keep(running[-1], experts_TK)
        return weights, experts_TK

    apply([
        Patch(_CHOICE, chosen, _CHOICE_TAKES),
        Patch(_EXPERTS, experts_of_layer, "self layer x router_logits input_ids"),
    ])  # fmt: skip


def _capture(capturer: Any, columns: dict[int, int], layer: Any, experts_TK: torch.Tensor) -> None:
    """Keep the experts that a layer chose; columns count routers, without dense layers, as in vLLM 0.21."""
    capturer.capture(columns[id(layer)], experts_TK)
