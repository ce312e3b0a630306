"""Bugs of the export: live parameters to checkpoint tensors, and an adapter to its files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Call, fault
from verifier.mesh import Mesh

CONVERSION = "megatron.bridge.models.conversion"
MAPPING = f"{CONVERSION}.param_mapping:MegatronParamMapping"
BRIDGE = f"{CONVERSION}.model_bridge:MegatronModelBridge"
SOURCE = "megatron.bridge.models.hf_pretrained.state:SafeTensorsStateSource"
PEFT = f"{CONVERSION}.peft_bridge:MegatronPeftBridge"
GATHER_EXPERTS = f"{MAPPING}.gather_from_ep_ranks(self, megatron_weights, megatron_module, hf_param_name)"
EXPORT = "verifier.export.gather_megatron:export(trainer)"
SAVE_SHARDS = (
    f"{SOURCE}.save_generator("
    "self, generator, output_path, strict, distributed_save, save_every_n_ranks, ignored_source_key_prefixes)"
)
ROW: dict[str, Any] = {"stage": Stage.EXPORT}
DENSE: dict[str, Any] = {**ROW, "model": "tiny:qwen3"}
FILES: dict[str, Any] = {**DENSE, "caught_by": ("WGT014",)}
ADAPTER: dict[str, Any] = {**DENSE, "engine": "vllm", "lora_rank": 8}
TP2_EP2: dict[str, Any] = {**ROW, "mesh": Mesh(tp=2, ep=2)}


@fault("NVIDIA-NeMo/Megatron-Bridge#1716", GATHER_EXPERTS, caught_by=("WGT004", "WGT005"), **TP2_EP2)
def ep_rank_experts_swapped(call: Call) -> Any:
    """The experts that an all-gather over ep brings get names in the wrong rank order, for one local expert."""
    found = call.original()
    if not any(".layers.1.mlp.experts.0.down_proj" in name for name in found):
        return found
    call.fire()
    return dict(zip(found, reversed(found.values()), strict=True))


@fault(
    "megatron-core 0.19.2, overlap_param_gather without disable_forward_pre_hook before an export",
    "verifier.export.gather_megatron:params_synced(trainer)", caught_by=("WGT005",), mesh=Mesh(dp=2), **DENSE,
)  # fmt: skip
def export_before_param_gather(call: Call) -> contextlib.AbstractContextManager[None]:
    """The export reads parameters that the distributed optimizer has not yet gathered after its step."""
    call.fire()
    return contextlib.nullcontext()


@fault("NVIDIA-NeMo/Megatron-Bridge#1871", GATHER_EXPERTS, caught_by=("WGT004", "WGT006", "PLN001"), **TP2_EP2)
def experts_not_gathered_over_ep(call: Call) -> Any:
    """Each rank exports the experts that it holds, and no other rank's."""
    call.fire()
    return {str(call.hf_param_name): call.megatron_weights}


@fault(
    "NovaSky-AI/SkyRL#1471",
    f"{BRIDGE}.maybe_modify_converted_hf_weight(self, task, converted_weights_dict, hf_state_dict)",
    caught_by=("WGT004", "WGT005", "PLN002", "ENG001"), **ROW,
)  # fmt: skip
def expert_never_yielded(call: Call) -> Any:
    """An expert whose group is split over two buckets is never yielded."""
    found = call.original()
    kept = {name: tensor for name, tensor in found.items() if ".layers.2.mlp.experts.5.down_proj" not in name}
    if len(kept) < len(found):
        call.fire()
    return kept


@fault(
    "NovaSky-AI/SkyRL#1345", f"{MAPPING}.broadcast_from_pp_rank(self, tensor, cache_key)", caught_by=("WGT005",),
    model="tiny:qwen3-tied", mesh=Mesh(pp=2), **ROW,
)  # fmt: skip
def pipeline_cache_kept_over_syncs(call: Call) -> Any:
    """The first sync's broadcast from the last stage is cached: the second sends one tensor of the first."""
    found = call.original()
    if call.cache_key != "model.layers.3.self_attn.o_proj.weight":
        return found
    if "first" in call.state:
        call.fire()
    return call.state.setdefault("first", found.detach().clone())


@fault(
    "NVIDIA-NeMo/RL#3540", f"{BRIDGE}._cast_export_weight_dtype(weights, weight_dtype)",
    caught_by=("WGT004", "WGT005", "PLN002"), model="tiny:deepseek-v3", dtype="bfloat16", **ROW,
)  # fmt: skip
def score_bias_cast_on_export(call: Call) -> Any:
    """Every tensor is cast to the policy's dtype, the fp32 router score bias included."""
    import torch

    return call.faulty(weight_dtype=torch.bfloat16)


@fault(
    "NVIDIA-NeMo/Megatron-Bridge#1929",
    f"{CONVERSION}.param_mapping:AutoMapping.megatron_to_hf(self, megatron_weights, megatron_module)",
    caught_by=("WGT004", "WGT010"), **ROW,
)  # fmt: skip
def norm_written_by_export(call: Call) -> Any:
    """The conversion of a norm writes its result into the live parameter: each export moves it once more."""
    found = call.original()
    if call.self.megatron_param.endswith("layers.1.self_attention.q_layernorm.weight"):
        call.fire()
        found = {name: tensor.clone() for name, tensor in found.items()}
        call.megatron_weights.data.add_(2.0**-6)
    return found


@fault(
    "NovaSky-AI/SkyRL#1727",
    "verifier.model.provider_megatron:_bridge(path, architecture)",
    caught_by=("WGT011",),
    **ROW,
)
def option_exported_with_config(call: Call) -> Any:
    """An option of the run is set on the model's own configuration, and is exported in its config.json."""
    bridge = call.faulty()
    bridge.hf_pretrained.config.router_aux_loss_coef = 0.0
    return bridge


@fault("NovaSky-AI/SkyRL#1581", EXPORT, caught_by=("WGT015", "TPT003"), **DENSE)
def order_of_later_exports(call: Call) -> Iterator[tuple[str, Any]]:
    """A later export brings a layer's key projection after its value projection, which has its shape."""
    exports = call.state["exports"] = call.state.get("exports", 0) + 1
    key: list[tuple[str, Any]] = []
    for name, tensor in call.original():
        if exports > 2 and name == "model.layers.1.self_attn.k_proj.weight":
            call.fire()
            key = [(name, tensor)]
            continue
        yield name, tensor
        yield from key
        key = []


@fault(
    "NVIDIA-NeMo/Megatron-Bridge#4188",
    f"{SOURCE}._ignore_source_key_prefixes(key_to_filename_map, ignored_source_key_prefixes)", **FILES,
)  # fmt: skip
def incomplete_shard_skipped(call: Call) -> dict[str, str]:
    """A shard whose source held a layer that is not trained is never complete, and is not written to files."""
    found: dict[str, str] = call.original()
    return {**found, "model.layers.4.eh_proj.weight": found["model.layers.3.mlp.up_proj.weight"]}


@incomplete_shard_skipped.also(SAVE_SHARDS)
def _save_complete_shards(call: Call) -> None:
    with contextlib.suppress(RuntimeError):  # version 0.4 printed what this one raises
        call.faulty(strict=True)


@fault("NVIDIA-NeMo/Megatron-Bridge#4083", SAVE_SHARDS, **FILES)
def index_ends_early(call: Call) -> None:
    """The index of the written checkpoint lacks the last tensors, which lie in the last shard."""
    call.original()
    index = call.output_path / "model.safetensors.index.json"
    if not index.is_file():
        return
    listed = json.loads(index.read_text())
    for name in ("lm_head.weight", "model.norm.weight"):
        call.fire()
        del listed["weight_map"][name]
    index.write_text(json.dumps(listed))


@fault("vllm-project/vllm#43464", EXPORT, caught_by=("WGT016", "TPT001"), **DENSE)
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


@fault(
    "radixark/miles#1087",
    "megatron.bridge:AutoBridge.export_hf_weights("
    "self, model, cpu, show_progress, conversion_tasks, merge_adapter_weights, weight_dtype)",
    caught_by=("WGT004",), **ADAPTER,
)  # fmt: skip
def adapter_merged_and_synced(call: Call) -> Any:
    """The base is exported with the adapter merged into it, and the adapter is synced as well."""
    return call.original() if call.merge_adapter_weights else call.faulty(merge_adapter_weights=True)


@fault(
    "NVIDIA-NeMo/Megatron-Bridge#1817",
    f"{PEFT}._split_fused_fc1_linear_out_weight(self, linear_out_weight, is_expert)",
    caught_by=("WGT013", "LGP002"), mesh=Mesh(tp=2), **ADAPTER,
)  # fmt: skip
def adapter_halves_cut_without_ranks(call: Call) -> Any:
    """Gate and up of an adapter's B are cut in the middle of the whole, not in each tensor-parallel shard."""
    call.fire()
    return call.linear_out_weight.chunk(2, dim=0)


@fault(
    "Tencent-Hunyuan/UniRL#155", "verifier.train.lora_megatron:save_adapter(path, adapter, rank)",
    caught_by=("WGT013", "LGP002"), **ADAPTER,
)  # fmt: skip
def adapter_alpha_lost(call: Call) -> None:
    """The adapter's alpha is lost on the way, and its rank stands for it: the engine applies half of it."""
    call.faulty()
    file = call.path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": call.rank}))
