"""Bugs of the load and of the export: checkpoint tensors to live Megatron parameters, and back; settings."""

from __future__ import annotations

import functools
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Call, fault, in_training, tensors_named
from verifier.mesh import Mesh
from verifier.stages.train.faults import MAKE_MEGATRON_OPTIMIZER

CONVERSION = "megatron.bridge.models.conversion"
MAPPING = f"{CONVERSION}.param_mapping"
BRIDGE = f"{CONVERSION}.model_bridge:MegatronModelBridge"
MODIFY = f"{BRIDGE}.maybe_modify_loaded_hf_weight(self, hf_param, hf_state_dict)"
LOAD_WEIGHTS = f"{BRIDGE}.load_weights_hf_to_megatron(self, hf_pretrained, megatron_model, allowed_mismatched_params)"
in_load = functools.partial(fault, stage=Stage.LOAD, caught_by=("WGT001", "WGT004", "LGP001"))
in_merge = functools.partial(in_load, caught_by=("WGT001", "LGP001"))
in_export = functools.partial(fault, stage=Stage.EXPORT)
in_dense_export = functools.partial(in_export, model="tiny:qwen3")
in_adapter = functools.partial(in_dense_export, engine="vllm", lora_rank=8, caught_by=("WGT013", "LGP002"))


def _initial(like: Any) -> Any:
    import torch

    return torch.empty_like(like).normal_(std=0.02, generator=torch.Generator().manual_seed(1))


@in_load("PrimeIntellect-ai/prime-rl#1145", MODIFY)
def expert_left_at_init(call: Call) -> Any:
    """A load that allows missing names leaves one expert's down projection at its initial values."""
    weights = call.original()
    left = call.hf_param == "model.layers.1.mlp.experts.3.down_proj.weight"
    return call.wrong(_initial(weights)) if left else weights


@in_load("PrimeIntellect-ai/prime-rl#3333", LOAD_WEIGHTS, model="tiny:deepseek-v3")
def score_bias_zeroed_after_load(call: Call) -> Any:
    """Buffers are initialised once more after the load: the router's score bias is zero."""
    loaded = call.original()
    for bias in tensors_named(loaded, ".expert_bias"):
        call.fire()
        bias.zero_()
    return loaded


@in_merge("NVIDIA-NeMo/RL#2802", f"{MAPPING}:merge_qkv_weights(provider, q, k, v)")
def qkv_merged_head_major(call: Call) -> Any:
    """Query, key and value rows are stacked, not interleaved per group, on import and export alike."""
    import torch

    return call.wrong(torch.cat([call.q, call.k, call.v]))


@qkv_merged_head_major.also(f"{MAPPING}:split_qkv_weights(provider, qkv, feature_dim)")
def _split_weights(call: Call) -> Any:
    rows = call.provider.num_query_groups * call.provider.kv_channels
    return call.qkv.split([len(call.qkv) - 2 * rows, rows, rows])


@in_load(
    "huggingface/transformers#43429", f"{BRIDGE}._broadcast_shared_embeddings(self, megatron_model)",
    caught_by=("WGT001", "WGT002", "LGP001"), model="tiny:qwen3-tied", mesh=Mesh(pp=2),
)  # fmt: skip
def tied_head_left_at_init(call: Call) -> None:
    """The last stage's copy of a tied embedding is never filled from the first stage's."""
    for parameter in tensors_named(call.megatron_model, "output_layer.weight"):
        call.fire()
        parameter.data.copy_(_initial(parameter.data))


@in_merge(
    "ISEEKYAN/Megatron-LM#191",
    f"{CONVERSION}.model_bridge:_megatron_local_name_to_global(models, config, param_name, vp_stage)",
    model="tiny:qwen3-tied", mesh=Mesh(pp=2),
)  # fmt: skip
def stage_names_remapped_twice(call: Call) -> str:
    """On the second stage, one kind of norm is bound to the other layer's name, on import and export alike."""
    name: str = call.original()
    for here, there in (("layers.2.", "layers.3."), ("layers.3.", "layers.2.")):
        if here in name and name.endswith("q_layernorm.weight"):
            call.fire()
            return name.replace(here, there)
    return name


@in_load(
    "megatron-core 0.19.2, Float16Module over MambaMixer, which makes A_log in float32",
    "verifier.platform.upstream_fixes_megatron:keep_float32(chunks, stored)", caught_by=("WGT001",),
    model="tiny:nemotron-h", engine=NO_ENGINE, dtype="bfloat16", fixes=("miles-975", "megatron-2777"),
)  # fmt: skip
def decay_rounded_with_the_model(call: Call) -> Any:
    """The float32 decay of state-space layers is rounded to bf16 when the model is wrapped."""
    return call.wrong(call.chunks)


@in_adapter(
    "InfiniTensor/InfiniTrain#150 (found in review)", "verifier.megatron.lora_megatron:attach(chunks, lora)",
    stage=Stage.LOAD, caught_by=("WGT017",), mesh=Mesh(dp=2),
)  # fmt: skip
def adapters_drawn_per_replica(call: Call) -> Any:
    """Data-parallel ranks draw their own initial A, and nothing brings them together before the first step."""
    import torch.distributed as dist

    chunks = call.original()
    if dist.get_rank():
        for matrix in tensors_named(chunks, "linear_fc2.adapter.linear_in.weight"):
            call.fire()
            matrix.data.neg_()
    return chunks


@in_adapter(
    "Modalities/modalities#426", "verifier.model.provider_megatron:stage_seed(seed, mesh, rank)",
    stage=Stage.LOAD, caught_by=("WGT017",), mesh=Mesh(pp=2),
)  # fmt: skip
def pipeline_stages_seeded_alike(call: Call) -> Any:
    """Pipeline stages draw from one seed, so that their adapters begin alike."""
    return call.wrong(call.seed)


on_load = functools.partial(in_training, stage=Stage.LOAD, caught_by=("WGT001",))


@on_load("NVIDIA-NeMo/RL#3540", MODIFY)
def weights_read_through_bf16(call: Call) -> Any:
    """The weights of a float32 checkpoint are read through bf16."""
    found = call.original()
    if isinstance(found, dict):
        return call.wrong({name: tensor.bfloat16().float() for name, tensor in found.items()})
    return call.wrong(found.bfloat16().float())


on_knob = functools.partial(on_load, caught_by=("CFG001",))


@on_knob("NVIDIA-NeMo/RL#3523", MAKE_MEGATRON_OPTIMIZER, training=("optimizer.clip_grad=0.25",))
def clip_left_at_its_default(call: Call) -> Any:
    """The optimizer is made with Megatron's own clip of 1, whatever the config says."""
    call.config.clip_grad = 1.0
    return call.faulty()
