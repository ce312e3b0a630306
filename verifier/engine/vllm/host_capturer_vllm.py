"""vLLM 0.21's capturer of routes where device and host are one: routes are filed at once, without streams.

vLLM 0.22 replaced its capturer by one that runs on a CPU as it is.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.fused_moe.routed_experts_capturer import (
    _RoutedExpertsCapturerReal,
    _RoutedExpertsHostCache,
    bind_routing_capture_to_model,
    set_global_experts_capturer,
)


class HostCapturer(_RoutedExpertsCapturerReal):
    """vLLM's capturer without streams and pinned memory."""

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


def install(runner: Any) -> None:
    """Give a model runner the capturer."""
    set_global_experts_capturer(HostCapturer(runner))
    bind_routing_capture_to_model(runner.model)
    runner._positions_cpu = torch.empty(runner.scheduler_config.max_num_batched_tokens, dtype=torch.long)
    runner.routed_experts_initialized = True


def keep(layer: Any, experts_TK: torch.Tensor) -> None:
    """Keep the experts that a layer chose."""
    layer._routing_replay_out[: len(experts_TK)].copy_(experts_TK)
