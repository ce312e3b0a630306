"""Knobs of the engines that sample for a run."""

from __future__ import annotations

from dataclasses import dataclass

from verifier.config.commands import EngineOptions
from verifier.knob import knob

REQUEST_S = 600.0
"""Seconds that any request of an engine may take."""
LEAST_TOKENS_PER_S = 100.0
"""Tokens that an engine samples in a second, at least, over all answers that run at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(EngineOptions):
    """Engines that sample."""

    replicas: int = knob("Engines; prompt p of a batch is answered by engine p modulo their number.", 1, least=1)
    kv_cache_gib: float | None = knob(
        "Keys and values of vLLM, each rank; null: room for a step's answers, or a share of the device.", None,
        unit="GiB", above=0,
    )  # fmt: skip
    request_timeout_s: float | None = knob(
        "Deadline of one request; null: 600 s, and 1 s for each 100 tokens that it may sample.", None, above=0,
        unit="seconds",
    )  # fmt: skip

    def request_deadline_s(self, sampled_tokens: int) -> float:
        """Seconds that a request which samples up to so many tokens may take.

        Source:
            848 tokens/s were measured on one H200 at the sizes of Qwen3-0.6B, with a small cache and without graphs.
        """
        if self.request_timeout_s is not None:
            return self.request_timeout_s
        return REQUEST_S + sampled_tokens / LEAST_TOKENS_PER_S

    def replays_graphs(self, tier: str) -> bool:
        """True if vLLM replays CUDA graphs in a training run.

        By default it does on a GPU, but for quantized weights (vllm #48251) and for adapters, which no run has tried.
        """
        if self.cuda_graphs is not None:
            return self.cuda_graphs
        return tier == "cuda" and self.kind == "vllm" and self.quantization is None and not self.lora_rank
