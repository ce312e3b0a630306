"""Bugs of requests to an engine that holds an adapter: they name none, or another one than they seem to."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, Side, fault, held

ADAPTER: dict[str, Any] = {
    "stage": Stage.ROLLOUT, "side": Side.DRIVER, "engine": TRAINING, "model": "tiny:add", "caught_by": ("LGP011",),
    "training": (
        "algorithm=grpo", "data.rollouts=null", "data.batch_size=4", "optimizer.warmup_steps=0", "lora.rank=8",
        "grpo.max_answer_tokens=8", "grpo.entropy_weight=1.0", "dtype=bf16",
    ),
}  # fmt: skip
VLLM = "verifier.engine.vllm.engine_vllm:VllmEngine"


@fault("radixark/miles#2075", f"{VLLM}._sampled(self, prompts, asked)", **ADAPTER)
def requests_without_the_adapter(call: Call) -> Any:
    """Requests do not name the adapter that the engine was given, and answers are those of the base."""
    with held(call.self, _adapter=None):
        return call.faulty()


@fault("vllm-project/vllm#48352", f"{VLLM}.load_adapter(self, path)", **ADAPTER)
def adapters_under_one_name(call: Call) -> Any:
    """Every version's adapter has one name, by which the prefix cache knows keys: those of older versions are read."""
    from vllm.lora.request import LoRARequest

    found, own = call.original(), call.self._adapter
    call.self._adapter = LoRARequest("policy", own.lora_int_id, own.lora_path)
    call.fire()
    return found
