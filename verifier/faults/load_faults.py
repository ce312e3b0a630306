"""Bugs of the load: checkpoint tensors and config to live Megatron parameters."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Call, fault, tensors_named
from verifier.mesh import Mesh

CONVERSION = "megatron.bridge.models.conversion"
MAPPING = f"{CONVERSION}.param_mapping"
BRIDGE = f"{CONVERSION}.model_bridge:MegatronModelBridge"
INIT_STD = 0.02
ROW: dict[str, Any] = {"stage": Stage.LOAD, "caught_by": ("WGT001", "LGP001")}
NOT_FILLED: dict[str, Any] = {"stage": Stage.LOAD, "caught_by": ("WGT001", "WGT004", "LGP001")}
TIED_STAGES: dict[str, Any] = {"model": "tiny:qwen3-tied", "mesh": Mesh(pp=2)}


def _initial(like: Any) -> Any:
    import torch

    return torch.empty_like(like).normal_(std=INIT_STD, generator=torch.Generator().manual_seed(1))


@fault(
    "PrimeIntellect-ai/prime-rl#1145", f"{BRIDGE}.maybe_modify_loaded_hf_weight(self, hf_param, hf_state_dict)",
    **NOT_FILLED,
)  # fmt: skip
def expert_left_at_init(call: Call) -> Any:
    """A load that allows missing names leaves one expert's down projection at its initial values."""
    weights = call.original()
    if call.hf_param != "model.layers.1.mlp.experts.3.down_proj.weight":
        return weights
    call.fire()
    return _initial(weights)


@fault(
    "PrimeIntellect-ai/prime-rl#3333",
    f"{BRIDGE}.load_weights_hf_to_megatron(self, hf_pretrained, megatron_model, allowed_mismatched_params)",
    model="tiny:deepseek-v3", **NOT_FILLED,
)  # fmt: skip
def score_bias_zeroed_after_load(call: Call) -> Any:
    """Buffers are initialised once more after the load: the router's score bias is zero."""
    loaded = call.original()
    for bias in tensors_named(loaded, ".expert_bias"):
        call.fire()
        bias.zero_()
    return loaded


def _stacked(call: Call) -> Any:
    import torch

    call.fire()
    return torch.cat([call.q, call.k, call.v])


def _split(config: Any, qkv: Any) -> Any:
    rows = config.num_query_groups * config.kv_channels
    return qkv.split([len(qkv) - 2 * rows, rows, rows])


@fault("NVIDIA-NeMo/RL#2802", f"{MAPPING}:merge_qkv_weights(provider, q, k, v)", **ROW)
def qkv_merged_head_major(call: Call) -> Any:
    """Query, key and value rows are stacked, not interleaved per group, on import and export alike."""
    return _stacked(call)


@qkv_merged_head_major.also(f"{MAPPING}:split_qkv_weights(provider, qkv, feature_dim)")
def _split_weights(call: Call) -> Any:
    return _split(call.provider, call.qkv)


@fault("ServiceNow/Fast-LLM#398", f"{MAPPING}:merge_qkv_biases(config, q, k, v)", model="tiny:qwen2", **ROW)
def qkv_biases_merged_head_major(call: Call) -> Any:
    """The biases of queries, keys and values are stacked where their rows are interleaved, both ways."""
    return _stacked(call)


@qkv_biases_merged_head_major.also(f"{MAPPING}:split_qkv_biases(config, qkv)")
def _split_biases(call: Call) -> Any:
    return _split(call.config, call.qkv)


@fault(
    "huggingface/transformers#43429", f"{BRIDGE}._broadcast_shared_embeddings(self, megatron_model)",
    stage=Stage.LOAD, caught_by=("WGT001", "WGT002", "LGP001"), **TIED_STAGES,
)  # fmt: skip
def tied_head_left_at_init(call: Call) -> None:
    """The last stage's copy of a tied embedding is never filled from the first stage's."""
    for parameter in tensors_named(call.megatron_model, "output_layer.weight"):
        call.fire()
        parameter.data.copy_(_initial(parameter.data))


@fault(
    "ISEEKYAN/Megatron-LM#191",
    f"{CONVERSION}.model_bridge:_megatron_local_name_to_global(models, config, param_name, vp_stage)",
    **ROW, **TIED_STAGES,
)  # fmt: skip
def stage_names_remapped_twice(call: Call) -> str:
    """On the second stage, one kind of norm is bound to the other layer's name, on import and export alike."""
    name: str = call.original()
    for here, there in (("layers.2.", "layers.3."), ("layers.3.", "layers.2.")):
        if here in name and name.endswith("q_layernorm.weight"):
            call.fire()
            return name.replace(here, there)
    return name


@fault(
    "megatron-core 0.19.2, Float16Module over MambaMixer, which makes A_log in float32",
    "verifier.platform.upstream_fixes_megatron:keep_float32(chunks, stored)",
    stage=Stage.LOAD, caught_by=("WGT001",), model="tiny:nemotron-h", engine=NO_ENGINE, dtype="bfloat16",
    fixes=("miles-975", "megatron-2777"),
)  # fmt: skip
def decay_rounded_with_the_model(call: Call) -> Any:
    """The float32 decay of state-space layers is rounded to bf16 when the model is wrapped."""
    call.fire()
    return call.chunks
