"""Bugs of the load: checkpoint tensors and config to live Megatron parameters."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, FireCounter, fault
from verifier.mesh import Mesh

CONVERSION = "megatron.bridge.models.conversion"
MAPPING = f"{CONVERSION}.param_mapping"
BRIDGE = f"{CONVERSION}.model_bridge:MegatronModelBridge"
INIT_STD = 0.02


def _initial(like: Any) -> Any:
    import torch

    return torch.empty_like(like).normal_(std=INIT_STD, generator=torch.Generator().manual_seed(1))


@fault(
    f"{BRIDGE}.maybe_modify_loaded_hf_weight(self, hf_param, hf_state_dict)",
    id="expert-left-at-init", stage=Stage.LOAD, reproduces="PrimeIntellect-ai/prime-rl#1145",
    caught_by=("WGT001", "WGT004", "LGP001"),
)  # fmt: skip
def expert_left_at_init(original: Any, fire: FireCounter, self: Any, hf_param: Any, hf_state_dict: Any) -> Any:
    """A load that allows missing names leaves one expert's down projection at its initial values."""
    weights = original(self, hf_param, hf_state_dict)
    if hf_param != "model.layers.1.mlp.experts.3.down_proj.weight":
        return weights
    fire()
    return _initial(weights)


@fault(
    f"{BRIDGE}.load_weights_hf_to_megatron(self, hf_pretrained, megatron_model, allowed_mismatched_params)",
    id="score-bias-zeroed-after-load", stage=Stage.LOAD, reproduces="PrimeIntellect-ai/prime-rl#3333",
    caught_by=("WGT001", "WGT004", "LGP001"), model="tiny:deepseek-v3",
)  # fmt: skip
def score_bias_zeroed_after_load(original: Any, fire: FireCounter, *args: Any, **options: Any) -> Any:
    """Buffers are initialised once more after the load: the router's score bias is zero."""
    loaded = original(*args, **options)
    for chunk in loaded:
        for name, buffer in chunk.named_buffers():
            if name.endswith(".expert_bias"):
                fire()
                buffer.zero_()
    return loaded


@fault(
    f"{MAPPING}:merge_qkv_weights(provider, q, k, v)",
    id="qkv-merged-head-major", stage=Stage.LOAD, reproduces="NVIDIA-NeMo/RL#2802", caught_by=("WGT001", "LGP001"),
)  # fmt: skip
def qkv_merged_head_major(original: Any, fire: FireCounter, provider: Any, q: Any, k: Any, v: Any) -> Any:
    """Query, key and value rows are stacked, not interleaved per group, on import and export alike."""
    import torch

    fire()
    return torch.cat([q, k, v])


@qkv_merged_head_major.also(f"{MAPPING}:split_qkv_weights(provider, qkv, feature_dim)")
def _split_weights(original: Any, fire: FireCounter, provider: Any, qkv: Any, feature_dim: Any = None) -> Any:
    import torch

    size = provider.kv_channels
    rows = [provider.num_attention_heads * size, *[provider.num_query_groups * size] * 2]
    return torch.split(qkv, rows)


@fault(
    f"{MAPPING}:merge_qkv_biases(config, q, k, v)",
    id="qkv-biases-merged-head-major", stage=Stage.LOAD, reproduces="ServiceNow/Fast-LLM#398",
    caught_by=("WGT001", "LGP001"), model="tiny:qwen2",
)  # fmt: skip
def qkv_biases_merged_head_major(original: Any, fire: FireCounter, config: Any, q: Any, k: Any, v: Any) -> Any:
    """The biases of queries, keys and values are stacked where their rows are interleaved, both ways."""
    import torch

    fire()
    return torch.cat([q, k, v])


@qkv_biases_merged_head_major.also(f"{MAPPING}:split_qkv_biases(config, qkv)")
def _split_biases(original: Any, fire: FireCounter, config: Any, qkv: Any) -> Any:
    import torch

    groups = config.num_query_groups * config.kv_channels
    return torch.split(qkv, [len(qkv) - 2 * groups, groups, groups])


@fault(
    f"{BRIDGE}._broadcast_shared_embeddings(self, megatron_model)",
    id="tied-head-left-at-init", stage=Stage.LOAD, reproduces="huggingface/transformers#43429",
    caught_by=("WGT001", "WGT002", "LGP001"), model="tiny:qwen3-tied", mesh=Mesh(pp=2),
)  # fmt: skip
def tied_head_left_at_init(original: Any, fire: FireCounter, self: Any, megatron_model: Any) -> None:
    """The last stage's copy of a tied embedding is never filled from the first stage's."""
    for chunk in megatron_model:
        for name, parameter in chunk.named_parameters():
            if name.endswith("output_layer.weight"):
                fire()
                parameter.data.copy_(_initial(parameter.data))


@fault(
    f"{CONVERSION}.model_bridge:_megatron_local_name_to_global(models, config, param_name, vp_stage)",
    id="stage-names-remapped-twice", stage=Stage.LOAD, reproduces="ISEEKYAN/Megatron-LM#191",
    caught_by=("WGT001", "LGP001"), model="tiny:qwen3-tied", mesh=Mesh(pp=2),
)  # fmt: skip
def stage_names_remapped_twice(original: Any, fire: FireCounter, *args: Any, **options: Any) -> str:
    """On the second stage, one kind of norm is bound to the other layer's name, on import and export alike."""
    name: str = original(*args, **options)
    for here, there in (("layers.2.", "layers.3."), ("layers.3.", "layers.2.")):
        if here in name and name.endswith("q_layernorm.weight"):
            fire()
            return name.replace(here, there)
    return name


@fault(
    "verifier.platform.upstream_fixes_megatron:keep_float32(chunks, stored)",
    id="decay-rounded-with-the-model", stage=Stage.LOAD, caught_by=("WGT001",),
    reproduces="megatron-core 0.19.2, Float16Module over MambaMixer, which makes A_log in float32",
    model="tiny:nemotron-h", engine=NO_ENGINE, dtype="bfloat16",
    fixes=("miles-975", "megatron-2777"),
)  # fmt: skip
def decay_rounded_with_the_model(original: Any, fire: FireCounter, chunks: Any, stored: Any) -> Any:
    """The float32 decay of state-space layers is rounded to bf16 when the model is wrapped."""
    fire()
    return chunks
