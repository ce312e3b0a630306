"""Bugs of the load of a training run: weights that are not those of the checkpoint before the first step."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import TRAINING, Call, fault

BRIDGE = "megatron.bridge.models.conversion.model_bridge:MegatronModelBridge"
MODIFY = f"{BRIDGE}.maybe_modify_loaded_hf_weight(self, hf_param, hf_state_dict)"
LOAD_WEIGHTS = f"{BRIDGE}.load_weights_hf_to_megatron(self, hf_pretrained, megatron_model, allowed_mismatched_params)"
ROW: dict[str, Any] = {"engine": TRAINING, "model": "tiny:add", "stage": Stage.LOAD, "caught_by": ("WGT001",)}


def _at_init(call: Call, name: str) -> Any:
    """Weights as they are loaded; of one tensor, as a new model has them."""
    import torch

    weights = call.original()
    if call.hf_param != name:
        return weights
    return call.wrong(torch.empty_like(weights).normal_(std=0.02, generator=torch.Generator().manual_seed(1)))


@fault("PrimeIntellect-ai/prime-rl#1145", MODIFY, **ROW)
def linear_left_at_init_in_tuning(call: Call) -> Any:
    """Fine-tuning begins with one down projection at its initial values: a load that allows missing names."""
    return _at_init(call, "model.layers.1.mlp.down_proj.weight")


@fault("NVIDIA-NeMo/RL#3540", MODIFY, **ROW)
def weights_read_through_bf16(call: Call) -> Any:
    """The weights of a float32 checkpoint are read through bf16."""
    found = call.original()
    if isinstance(found, dict):
        return call.wrong({name: tensor.bfloat16().float() for name, tensor in found.items()})
    return call.wrong(found.bfloat16().float())
