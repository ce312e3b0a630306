"""Routes of a mixture of experts on vLLM's CPU worker: what it lacks of vLLM's own record of them.

vLLM 0.21 copies routes by CUDA streams, and its CPU experts choose inside of their own function, where no route is
written. Finding routes by position and request, and giving them out, stay vLLM's own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    _RoutedExpertsCapturerReal,
    _RoutedExpertsHostCache,
    bind_routing_capture_to_model,
    set_global_experts_capturer,
)

from verifier.platform.patch import Patch, apply, current

_CHOICE = "vllm.model_executor.layers.fused_moe.cpu_fused_moe:select_experts"
_CHOICE_TAKES = (
    "hidden_states router_logits top_k use_grouped_topk renormalize topk_group num_expert_group "
    "custom_routing_function scoring_func routed_scaling_factor e_score_correction_bias"
)
_EXPERTS = (
    "vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.apply_monolithic"
)


class HostCapturer(_RoutedExpertsCapturerReal):
    """vLLM's capturer where device and host are one: routes are filed at once, without streams and pinned memory."""

    def __init__(self, runner: Any) -> None:
        super().__init__(
            runner.model_config, max_num_batched_tokens=runner.scheduler_config.max_num_batched_tokens,
            num_fused_shared_experts=0, max_model_len=runner.max_model_len, device="cpu", skip_host_cache=True,
        )  # fmt: skip
        self.host_cache = _RoutedExpertsHostCache(self.num_hidden_layers, self.num_experts_per_tok, self.max_model_len)
        self._pinned_staging = self.device_cache.buffer

    def sync_fwd_experts_buffer_DtoH(self, positions: torch.Tensor, num_scheduled_tokens: dict[str, int]) -> None:  # noqa: N802 - vLLM's name
        """File the routes of a forward pass under its requests."""
        self._pending_total_tokens = sum(num_scheduled_tokens.values())
        self._pending_positions, self._pending_num_scheduled = positions.numpy().copy(), num_scheduled_tokens
        self._scatter_to_host()


def record_routes(runner: Any) -> None:
    """Have vLLM's CPU model runner report the experts of each token, as its GPU runner does.

    Raises:
        UsageError: another vLLM, whose experts choose elsewhere.
    """
    set_global_experts_capturer(HostCapturer(runner))
    bind_routing_capture_to_model(runner.model)
    runner._positions_cpu = torch.empty(runner.scheduler_config.max_num_batched_tokens, dtype=torch.long)
    runner.routed_experts_initialized = True
    choose: Callable[..., Any] = current(_CHOICE)
    run_experts: Callable[..., Any] = current(_EXPERTS)
    layers: list[Any] = []

    def experts_of_layer(self: Any, layer: Any, *inputs: Any, **named: Any) -> Any:
        layers.append(layer)
        try:
            return run_experts(self, layer, *inputs, **named)
        finally:
            layers.pop()

    def chosen(*inputs: Any, **named: Any) -> Any:
        weights, experts_TK = choose(*inputs, **named)
        layers[-1]._routing_replay_out[: len(experts_TK)].copy_(experts_TK)
        return weights, experts_TK

    apply([
        Patch(_CHOICE, chosen, _CHOICE_TAKES),
        Patch(_EXPERTS, experts_of_layer, "self layer x router_logits input_ids"),
    ])  # fmt: skip
