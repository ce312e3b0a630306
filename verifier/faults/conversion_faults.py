"""Bugs of the load and of the export: checkpoint tensors to live Megatron parameters, and back; an adapter to files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, TRAINING, Call, fault, tensors_named
from verifier.mesh import Mesh

CONVERSION = "megatron.bridge.models.conversion"
MAPPING = f"{CONVERSION}.param_mapping"
GATHERED = f"{MAPPING}:MegatronParamMapping"
BRIDGE = f"{CONVERSION}.model_bridge:MegatronModelBridge"
SOURCE = "megatron.bridge.models.hf_pretrained.state:SafeTensorsStateSource"
PEFT = f"{CONVERSION}.peft_bridge:MegatronPeftBridge"
GATHER_EXPERTS = f"{GATHERED}.gather_from_ep_ranks(self, megatron_weights, megatron_module, hf_param_name)"
EXPORT = "verifier.export.gather_megatron:export(trainer)"
SAVE_SHARDS = (
    f"{SOURCE}.save_generator("
    "self, generator, output_path, strict, distributed_save, save_every_n_ranks, ignored_source_key_prefixes)"
)
INIT_STD = 0.02
in_load = functools.partial(fault, stage=Stage.LOAD, caught_by=("WGT001", "WGT004", "LGP001"))
in_merge = functools.partial(in_load, caught_by=("WGT001", "LGP001"))
in_export = functools.partial(fault, stage=Stage.EXPORT)
in_dense_export = functools.partial(in_export, model="tiny:qwen3")
in_files = functools.partial(in_dense_export, caught_by=("WGT014",))
in_adapter = functools.partial(in_dense_export, engine="vllm", lora_rank=8, caught_by=("WGT013", "LGP002"))


def _initial(like: Any) -> Any:
    import torch

    return torch.empty_like(like).normal_(std=INIT_STD, generator=torch.Generator().manual_seed(1))


@in_load("PrimeIntellect-ai/prime-rl#1145", f"{BRIDGE}.maybe_modify_loaded_hf_weight(self, hf_param, hf_state_dict)")
def expert_left_at_init(call: Call) -> Any:
    """A load that allows missing names leaves one expert's down projection at its initial values."""
    weights = call.original()
    left = call.hf_param == "model.layers.1.mlp.experts.3.down_proj.weight"
    return call.wrong(_initial(weights)) if left else weights


@in_load(
    "PrimeIntellect-ai/prime-rl#3333",
    f"{BRIDGE}.load_weights_hf_to_megatron(self, hf_pretrained, megatron_model, allowed_mismatched_params)",
    model="tiny:deepseek-v3",
)
def score_bias_zeroed_after_load(call: Call) -> Any:
    """Buffers are initialised once more after the load: the router's score bias is zero."""
    loaded = call.original()
    for bias in tensors_named(loaded, ".expert_bias"):
        call.fire()
        bias.zero_()
    return loaded


def _stacked(call: Call) -> Any:
    import torch

    return call.wrong(torch.cat([call.q, call.k, call.v]))


def _split(config: Any, qkv: Any) -> Any:
    rows = config.num_query_groups * config.kv_channels
    return qkv.split([len(qkv) - 2 * rows, rows, rows])


@in_merge("NVIDIA-NeMo/RL#2802", f"{MAPPING}:merge_qkv_weights(provider, q, k, v)")
def qkv_merged_head_major(call: Call) -> Any:
    """Query, key and value rows are stacked, not interleaved per group, on import and export alike."""
    return _stacked(call)


@qkv_merged_head_major.also(f"{MAPPING}:split_qkv_weights(provider, qkv, feature_dim)")
def _split_weights(call: Call) -> Any:
    return _split(call.provider, call.qkv)


@in_merge("ServiceNow/Fast-LLM#398", f"{MAPPING}:merge_qkv_biases(config, q, k, v)", model="tiny:qwen2")
def qkv_biases_merged_head_major(call: Call) -> Any:
    """The biases of queries, keys and values are stacked where their rows are interleaved, both ways."""
    return _stacked(call)


@qkv_biases_merged_head_major.also(f"{MAPPING}:split_qkv_biases(config, qkv)")
def _split_biases(call: Call) -> Any:
    return _split(call.config, call.qkv)


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


@in_export("NVIDIA-NeMo/Megatron-Bridge#1716", GATHER_EXPERTS, caught_by=("WGT004", "WGT005"), mesh=Mesh(tp=2, ep=2))
def ep_rank_experts_swapped(call: Call) -> Any:
    """The experts that an all-gather over ep brings get names in the wrong rank order, for one local expert."""
    found = call.original()
    swapped = any(".layers.1.mlp.experts.0.down_proj" in name for name in found)
    return call.wrong(dict(zip(found, reversed(found.values()), strict=True))) if swapped else found


@in_dense_export(
    "megatron-core 0.19.2, overlap_param_gather without disable_forward_pre_hook before an export",
    "verifier.export.gather_megatron:params_synced(trainer)", caught_by=("WGT005",), mesh=Mesh(dp=2),
)  # fmt: skip
def export_before_param_gather(call: Call) -> Any:
    """The export reads parameters that the distributed optimizer has not yet gathered after its step."""
    return call.wrong(contextlib.nullcontext())


@in_export(
    "NVIDIA-NeMo/Megatron-Bridge#1871", GATHER_EXPERTS, caught_by=("WGT004", "WGT006", "PLN001"), mesh=Mesh(tp=2, ep=2)
)
def experts_not_gathered_over_ep(call: Call) -> Any:
    """Each rank exports the experts that it holds, and no other rank's."""
    return call.wrong({str(call.hf_param_name): call.megatron_weights})


@in_export(
    "NovaSky-AI/SkyRL#1471",
    f"{BRIDGE}.maybe_modify_converted_hf_weight(self, task, converted_weights_dict, hf_state_dict)",
    caught_by=("WGT004", "WGT005", "PLN002", "ENG001"),
)
def expert_never_yielded(call: Call) -> Any:
    """An expert whose group is split over two buckets is never yielded."""
    found = call.original()
    kept = {name: tensor for name, tensor in found.items() if ".layers.2.mlp.experts.5.down_proj" not in name}
    return call.wrong(kept) if len(kept) < len(found) else found


@in_export(
    "NovaSky-AI/SkyRL#1345", f"{GATHERED}.broadcast_from_pp_rank(self, tensor, cache_key)", caught_by=("WGT005",),
    model="tiny:qwen3-tied", mesh=Mesh(pp=2),
)  # fmt: skip
def pipeline_cache_kept_over_syncs(call: Call) -> Any:
    """The first sync's broadcast from the last stage is cached: the second sends one tensor of the first."""
    found = call.original()
    if call.cache_key != "model.layers.3.self_attn.o_proj.weight":
        return found
    if "first" in call.state:
        return call.wrong(call.state["first"])
    call.state["first"] = found.detach().clone()
    return found


@in_export(
    "NVIDIA-NeMo/RL#3540", f"{BRIDGE}._cast_export_weight_dtype(weights, weight_dtype)",
    caught_by=("WGT004", "WGT005", "PLN002"), model="tiny:deepseek-v3", dtype="bfloat16",
)  # fmt: skip
def score_bias_cast_on_export(call: Call) -> Any:
    """Every tensor is cast to the policy's dtype, the fp32 router score bias included."""
    import torch

    return call.faulty(weight_dtype=torch.bfloat16)


@in_export(
    "NVIDIA-NeMo/Megatron-Bridge#1929",
    f"{MAPPING}:AutoMapping.megatron_to_hf(self, megatron_weights, megatron_module)", caught_by=("WGT004", "WGT010"),
)  # fmt: skip
def norm_written_by_export(call: Call) -> Any:
    """The conversion of a norm writes its result into the live parameter: each export moves it once more."""
    found = call.original()
    if call.self.megatron_param.endswith("layers.1.self_attention.q_layernorm.weight"):
        call.fire()
        found = {name: tensor.clone() for name, tensor in found.items()}
        call.megatron_weights.data.add_(2.0**-6)
    return found


@in_export(
    "NovaSky-AI/SkyRL#1727", "verifier.model.provider_megatron:_bridge(path, architecture)", caught_by=("WGT011",)
)
def option_exported_with_config(call: Call) -> Any:
    """An option of the run is set on the model's own configuration, and is exported in its config.json."""
    bridge = call.faulty()
    bridge.hf_pretrained.config.router_aux_loss_coef = 0.0
    return bridge


@in_dense_export("NovaSky-AI/SkyRL#1581", EXPORT, caught_by=("WGT006", "TPT002"))
def order_of_later_exports(call: Call) -> Iterator[tuple[str, Any]]:
    """A later export brings a layer's key projection after its value projection, which has its shape."""
    exports = call.state["exports"] = call.state.get("exports", 0) + 1
    exported = call.original()
    for name, tensor in exported:
        if exports > 2 and name == "model.layers.1.self_attn.k_proj.weight":
            call.fire()
            yield next(exported)
        yield name, tensor


@in_files(
    "NVIDIA-NeMo/Megatron-Bridge#4188",
    f"{SOURCE}._ignore_source_key_prefixes(key_to_filename_map, ignored_source_key_prefixes)",
)
def incomplete_shard_skipped(call: Call) -> dict[str, str]:
    """A shard whose source held a layer that is not trained is never complete, and is not written to files."""
    found: dict[str, str] = call.original()
    return {**found, "model.layers.4.eh_proj.weight": found["model.layers.3.mlp.up_proj.weight"]}


@incomplete_shard_skipped.also(SAVE_SHARDS)
def _save_complete_shards(call: Call) -> None:
    with contextlib.suppress(RuntimeError):  # version 0.4 printed what this one raises
        call.faulty(strict=True)


@in_files("NVIDIA-NeMo/Megatron-Bridge#4083", SAVE_SHARDS)
def index_ends_early(call: Call) -> None:
    """The index of the written checkpoint lacks the last tensors, which lie in the last shard."""
    import torch.distributed as dist

    call.original()
    index = call.output_path / "model.safetensors.index.json"
    if dist.get_rank() == 0 and index.is_file():
        listed = json.loads(index.read_text())
        for name in ("lm_head.weight", "model.norm.weight"):
            call.fire()
            del listed["weight_map"][name]
        index.write_text(json.dumps(listed))


@in_dense_export("vllm-project/vllm#43464", EXPORT, caught_by=("WGT016", "TPT001"))
def export_buffer_used_again(call: Call) -> Iterator[tuple[str, Any]]:
    """One buffer is returned for many tensors, and those that a chunk holds together all become the last."""
    buffer = None
    for name, tensor in call.original():
        if name.endswith((".k_proj.weight", ".v_proj.weight")):
            call.fire()
            buffer = tensor.clone() if buffer is None else buffer.copy_(tensor)
            yield name, buffer.view(tensor.shape)
        else:
            yield name, tensor


@in_adapter(
    "radixark/miles#1087",
    "megatron.bridge:AutoBridge.export_hf_weights("
    "self, model, cpu, show_progress, conversion_tasks, merge_adapter_weights, weight_dtype)",
    caught_by=("WGT004",),
)
def adapter_merged_and_synced(call: Call) -> Any:
    """The base is exported with the adapter merged into it, and the adapter is synced as well."""
    return call.original() if call.merge_adapter_weights else call.faulty(merge_adapter_weights=True)


@in_adapter(
    "NVIDIA-NeMo/Megatron-Bridge#1817",
    f"{PEFT}._split_fused_fc1_linear_out_weight(self, linear_out_weight, is_expert)",
    mesh=Mesh(tp=2), fixes=("bridge-5840",),
)  # fmt: skip
def adapter_halves_cut_without_ranks(call: Call) -> Any:
    """Gate and up of an adapter's B are cut in the middle of the whole, not in each tensor-parallel shard."""
    return call.wrong(call.linear_out_weight.chunk(2, dim=0))


@in_adapter(
    "InfiniTensor/InfiniTrain#150 (found in review)", "verifier.train.lora_megatron:attach(chunks, lora)",
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


TRAINED: dict[str, Any] = {"engine": TRAINING, "model": "tiny:add"}
ADAPTERS = (
    "algorithm=grpo", "data.rollouts=null", "data.batch_size=4", "grpo.entropy_weight=1.0", "optimizer.warmup_steps=0",
    "lora.rank=8",
    "grpo.max_answer_tokens=8",
)  # fmt: skip
MERGED = (*ADAPTERS, "lora.sync=merged", "engine.kind=hf")


@fault(
    "huggingface/trl#6688", EXPORT, stage=Stage.EXPORT,
    caught_by=("WGT010", "WGT012"), **TRAINED, training=MERGED,
)  # fmt: skip
def merged_and_unmerged(call: Call) -> Any:
    """The adapters are added to the base for the export and subtracted after it: the base drifts by the rounding."""
    import torch

    def base_moved() -> Any:
        yield from call.original()
        with torch.no_grad():
            for chunk in call.trainer.chunks:
                for module in chunk.modules():
                    if hasattr(module, "to_wrap"):
                        adapter = module.adapter
                        product = adapter.linear_out.weight @ adapter.linear_in.weight * (adapter.alpha / adapter.dim)
                        module.to_wrap.weight.add_(product).sub_(product)
                        call.fire()

    return base_moved()


@fault(
    "NVIDIA-NeMo/RL#3696",
    "megatron.bridge.peft.lora_merge:LoRAMerge.merge(self, base_weight, linear_out, linear_in, alpha, dim, tp_group, "
    "scale)", stage=Stage.EXPORT, caught_by=("WGT018",), **TRAINED, training=MERGED,
)  # fmt: skip
def adapter_merged_in_bf16(call: Call) -> Any:
    """The product of an adapter is rounded to bf16 before it is added to the base."""
    whole = call.faulty()
    return call.base_weight + (whole - call.base_weight).bfloat16().float()


@fault(
    "Tencent-Hunyuan/UniRL#155", "verifier.train.lora_megatron:save_adapter(path, adapter, lora)", stage=Stage.EXPORT,
    caught_by=("WGT013", "LGP009"), **TRAINED, training=ADAPTERS,
)  # fmt: skip
def alpha_lost_at_sync(call: Call) -> Any:
    """The adapter's alpha is lost on the way to the engine, which applies half of what the trainer does."""
    return call.faulty(lora=dataclasses.replace(call.lora, alpha=call.lora.rank))
