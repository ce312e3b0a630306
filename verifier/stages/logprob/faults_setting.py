"""Bugs of the trainer's settings that a short run hardly computes with: windows, bounds of logits, router dtypes."""

from __future__ import annotations

import functools
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Call, fault

SELF_ATTENTION = (
    "megatron.core.transformer.attention:SelfAttention.__init__(self, config, submodules, layer_number, "
    "attn_mask_type, cp_comm_type, pg_collection, pp_layer_offset, name)"
)
in_trainer = functools.partial(fault, stage=Stage.LOGPROB, caught_by=("LGP007",), engine=NO_ENGINE)


@in_trainer(
    "NVIDIA-NeMo/Megatron-Bridge#4610",
    "megatron.bridge.models.gemma.gemma2_bridge:Gemma2Bridge.provider_bridge(self, hf_pretrained)",
    model="tiny:gemma2", fixes=("bridge-5712",), caught_by=("LGP007", "LGP001"),
)  # fmt: skip
def bound_of_logits_not_passed_on(call: Call) -> Any:
    """The bound of the last logits in config.json is not passed on: every token is as likely among its neighbours."""
    provider = call.faulty()
    provider.final_logit_softcapping = None
    return provider


@in_trainer(
    "PrimeIntellect-ai/prime-rl#2952",
    "megatron.bridge.models.deepseek.deepseek_v3_bridge:DeepSeekV3Bridge.provider_bridge(self, hf_pretrained)",
    model="tiny:deepseek-v3", dtype="bfloat16",
)  # fmt: skip
def routers_in_the_models_dtype(call: Call) -> Any:
    """Routers that the model has in float32 compute in bf16, below the noise of bf16."""
    provider = call.faulty()
    provider.moe_router_dtype = None
    return provider


@in_trainer(
    "NVIDIA-NeMo/Megatron-Bridge#5712 (kin: there norms behind attention and MLP)",
    SELF_ATTENTION,
    model="tiny:qwen3", dtype="bfloat16",
)  # fmt: skip
def norms_of_heads_with_the_default_epsilon(call: Call) -> None:
    """A module makes norms without the epsilon of its config: 1e-5 for 1e-6, below the noise of bf16."""
    call.faulty()
    call.self.q_layernorm.eps = call.self.k_layernorm.eps = 1e-5
