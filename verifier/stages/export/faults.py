"""Bugs of exports: conversions, names, shards, files."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import HF_SAMPLES, SAMPLES, Call, Side, in_training
from verifier.mesh import Mesh
from verifier.stages.load.faults import BRIDGE, CONVERSION, MAPPING, in_adapter, in_dense_export, in_export

GATHERED = f"{MAPPING}:MegatronParamMapping"
SOURCE = "megatron.bridge.models.hf_pretrained.state:SafeTensorsStateSource"
PEFT = f"{CONVERSION}.peft_bridge:MegatronPeftBridge"
GATHER_EXPERTS = f"{GATHERED}.gather_from_ep_ranks(self, megatron_weights, megatron_module, hf_param_name)"
EXPORT = "verifier.export.gather_megatron:export(trainer)"
SAVE_SHARDS = (
    f"{SOURCE}.save_generator("
    "self, generator, output_path, strict, distributed_save, save_every_n_ranks, ignored_source_key_prefixes)"
)


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


@in_export("NovaSky-AI/SkyRL#1727", "verifier.model.provider_megatron:_bridge(path, config)", caught_by=("WGT011",))
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


@in_dense_export("NVIDIA-NeMo/Megatron-Bridge#4083", SAVE_SHARDS, caught_by=("WGT014",))
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


ADAPTERS = (
    *SAMPLES, "data.batch_size=4", "grpo.entropy_weight=1.0", "optimizer.warmup_steps=0", "lora.rank=8",
    "grpo.max_answer_tokens=8",
)  # fmt: skip
SAVE_ADAPTER = "verifier.megatron.lora_megatron:save_adapter(path, adapter, lora)"
MERGED = (*ADAPTERS, "lora.sync=merged", "engine.kind=hf")
MERGE = (
    "megatron.bridge.peft.lora_merge:LoRAMerge.merge(self, base_weight, linear_out, linear_in, alpha, dim, tp_group, "
    "scale)"
)


@in_training("NVIDIA-NeMo/RL#3696", MERGE, stage=Stage.EXPORT, caught_by=("WGT018",), training=MERGED)
def adapter_merged_in_bf16(call: Call) -> Any:
    """The product of an adapter is rounded to bf16 before it is added to the base."""
    whole = call.faulty()
    return call.base_weight + (whole - call.base_weight).bfloat16().float()


@in_training(
    "Tencent-Hunyuan/UniRL#155", SAVE_ADAPTER, stage=Stage.EXPORT, caught_by=("WGT013", "LGP009"), training=ADAPTERS,
)  # fmt: skip
def alpha_lost_at_sync(call: Call) -> Any:
    """The adapter's alpha is lost on the way to the engine, which applies half of what the trainer does."""
    return call.faulty(lora=dataclasses.replace(call.lora, alpha=call.lora.rank))


SAVE = "verifier.export.gather_megatron:save(trainer, folder, whole)"
LIVE = (
    *HF_SAMPLES, "grpo.max_answer_tokens=8", "grpo.entropy_weight=1.0", "optimizer.warmup_steps=0", "verify.every=1",
)  # fmt: skip
UNSAMPLED = tuple(text for text in LIVE if not text.startswith("verify.every"))
FIRST_STREAMS = 2
"""Streams of an export up to the first sync, with that of the plan."""
SECOND_UPDATE = 4
"""Stream of the sync after the second step: those of the plan, of the first sync and of the first step come before."""
RESUMED = (
    "algorithm=grpo", "data.rollouts=null", "data.batch_size=4", "grpo.max_answer_tokens=8", "grpo.kl_weight=0.1",
    "grpo.entropy_weight=1.0", "optimizer.warmup_steps=0",
)  # fmt: skip
FIRST_SYNC = "verifier.trainer.worker_megatron:TrainerWorker.sync(self, version, note, running, again, first)"
in_resume = functools.partial(in_training, stage=Stage.EXPORT, saved_on=Mesh())
in_final = functools.partial(in_training, stage=Stage.EXPORT, caught_by=("WGT019",), training=("steps=2",))


@in_final("NVIDIA-NeMo/Automodel#3193", SAVE, mesh=Mesh(dp=2))
def final_export_through_bf16(call: Call) -> None:
    """The last export casts all tensors to bf16, those that stay in float32 too; their files say float32."""
    import torch

    parameters = [parameter for chunk in call.trainer.chunks for parameter in chunk.parameters()]
    live = [parameter.detach().clone() for parameter in parameters]
    with torch.no_grad():
        for parameter in parameters:
            parameter.copy_(parameter.bfloat16())
        call.faulty()
        for parameter, weight in zip(parameters, live, strict=True):
            parameter.copy_(weight)


@in_final(
    "NovaSky-AI/SkyRL#1345", EXPORT, caught_by=("WGT020", "LGP009"), training=UNSAMPLED,
)  # fmt: skip
def tensor_of_the_sync_before_sent_once(call: Call) -> Any:
    """One sync, between two sampled steps, sends one tensor as the sync before had it; the next sends it right."""
    call.state["streams"] = count = call.state.get("streams", 0) + 1
    for name, tensor in call.original():
        if not name.endswith("layers.0.self_attn.o_proj.weight"):
            yield name, tensor
            continue
        before = call.state.get("before", tensor)
        call.state["before"] = tensor.clone()
        yield name, call.wrong(before) if count == SECOND_UPDATE else tensor


@in_final(
    "NVIDIA-NeMo/Automodel#3193", EXPORT, caught_by=("WGT018", "LGP009"),
    training=(*UNSAMPLED, "lora.rank=4", "lora.sync=merged"),
)  # fmt: skip
def base_rounded_beside_merged_matrices(call: Call) -> Any:
    """Matrices with adapters are merged right, and the frozen embedding beside them is sent through bf16."""
    for name, tensor in call.original():
        if name.endswith("embed_tokens.weight"):
            yield name, call.wrong(tensor.bfloat16().to(tensor.dtype))
        else:
            yield name, tensor


@in_final("huggingface/trl#5319", EXPORT, caught_by=("WGT004", "WGT005", "LGP009"), training=LIVE)
def first_sync_before_the_load(call: Call) -> Any:
    """The first sync takes norms as they were built, before the checkpoint was loaded; every later one is right."""
    import torch

    call.state["streams"] = count = call.state.get("streams", 0) + 1
    for name, tensor in call.original():
        if count <= FIRST_STREAMS and name.endswith("norm.weight"):
            yield name, call.wrong(torch.ones_like(tensor))
        else:
            yield name, tensor


@in_final("redai-studio/Relax#261", SAVE_ADAPTER, training=("lora.rank=8",))
def adapter_of_fewer_targets(call: Call) -> None:
    """The adapter's config names some of the linears that its file has matrices of: a reader skips the others."""
    call.faulty()
    file = call.path / "adapter_config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {"target_modules": config["target_modules"][:-1]}))


@in_final(
    "NVIDIA-NeMo/Automodel#3890", "verifier.trainer.model_files:copy_files(source, folder)",
    side=Side.CONTROLLER, caught_by=("WGT021",),
)  # fmt: skip
def generation_settings_of_an_empty_config(call: Call) -> None:
    """An empty generation_config.json is written beside the weights and outdoes the end tokens of config.json."""
    call.faulty()
    (call.folder / "generation_config.json").write_text("{}")


@in_resume("THUDM/slime#2380", FIRST_SYNC, caught_by=("WGT020",), training=("dtype=bf16", "engine.kind=hf", *RESUMED))
def reference_sent_at_the_first_sync_after_a_resume(call: Call) -> Any:
    """The reference is loaded last and stands in the model at the first sync, so that it samples the first step."""
    if not call.first:
        return call.original()
    from verifier.megatron.step_megatron import params_synced
    from verifier.trainer.state_megatron import replaced

    with params_synced(call.self._trainer), replaced(call.self._live, call.self._reference):
        return call.faulty()
