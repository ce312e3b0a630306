"""Knobs of the engines that sample for a run."""

from __future__ import annotations

import math
from dataclasses import dataclass

from verifier.config.commands import EngineOptions
from verifier.errors import UsageError
from verifier.knob import knob


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(EngineOptions):
    """Engines that sample."""

    replicas: int = knob("Engines; prompt p of a batch is answered by engine p modulo their number.", 1, least=1)
    kv_cache_gib: float | None = knob(
        "Keys and values of vLLM, each rank; null: room for all answers of a step, 0.125 to 1 or one sequence.", None,
        unit="GiB",
    )  # fmt: skip

    def refuse_cache(self, *, samples: bool) -> None:
        """Refuse a size of a cache that no engine has.

        Args:
            samples: the run samples from an engine.

        Raises:
            UsageError: names the knobs.
        """
        if self.kv_cache_gib is None:
            return
        given = f"engine.kv_cache_gib is {self.kv_cache_gib:g}"
        if not 0 < self.kv_cache_gib < math.inf:
            raise UsageError(f"{given}, it must be above 0 and finite")
        if not samples:
            raise UsageError(f"{given} and the run samples from no engine: leave it out")
        if self.kind != "vllm":
            raise UsageError(f"{given} and engine.kind is {self.kind}, which keeps no cache: leave it out")
