"""Bugs of the export: live parameters to checkpoint tensors, and an adapter to its files."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import FireCounter, fault
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
FILES: dict[str, Any] = {**ROW, "caught_by": ("WGT014",), "model": "tiny:qwen3"}
ADAPTER: dict[str, Any] = {**ROW, "model": "tiny:qwen3", "engine": "vllm", "lora_rank": 8}


@fault(
    GATHER_EXPERTS, id="ep-rank-experts-swapped", reproduces="NVIDIA-NeMo/Megatron-Bridge#1716",
    caught_by=("WGT004", "WGT005"), mesh=Mesh(tp=2, ep=2), **ROW,
)  # fmt: skip
def ep_rank_experts_swapped(original: Any, fire: FireCounter, *args: Any) -> Any:
    """The experts that an all-gather over ep brings get names in the wrong rank order, for one local expert."""
    found = original(*args)
    if not any(".layers.1.mlp.experts.0.down_proj" in name for name in found):
        return found
    fire()
    return dict(zip(found, reversed(found.values()), strict=True))


@fault(
    "verifier.export.gather_megatron:params_synced(trainer)",
    id="export-before-param-gather", caught_by=("WGT005",),
    reproduces="megatron-core 0.19.2, overlap_param_gather without disable_forward_pre_hook before an export",
    model="tiny:qwen3", mesh=Mesh(dp=2), **ROW,
)  # fmt: skip
@contextlib.contextmanager
def export_before_param_gather(original: Any, fire: FireCounter, trainer: Any) -> Iterator[None]:
    """The export reads parameters that the distributed optimizer has not yet gathered after its step."""
    fire()
    yield


@fault(
    GATHER_EXPERTS, id="experts-not-gathered-over-ep", reproduces="NVIDIA-NeMo/Megatron-Bridge#1871",
    caught_by=("WGT004", "WGT006", "PLN001"), mesh=Mesh(tp=2, ep=2), **ROW,
)  # fmt: skip
def experts_not_gathered_over_ep(
    original: Any, fire: FireCounter, self: Any, megatron_weights: Any, megatron_module: Any, hf_param_name: Any
) -> Any:
    """Each rank exports the experts that it holds, and no other rank's."""
    fire()
    return {str(hf_param_name): megatron_weights}


@fault(
    f"{BRIDGE}.maybe_modify_converted_hf_weight(self, task, converted_weights_dict, hf_state_dict)",
    id="expert-never-yielded", reproduces="NovaSky-AI/SkyRL#1471", caught_by=("WGT004", "WGT005", "PLN002", "ENG001"),
    **ROW,
)  # fmt: skip
def expert_never_yielded(original: Any, fire: FireCounter, *args: Any) -> Any:
    """An expert whose group is split over two buckets is never yielded."""
    found = original(*args)
    kept = {name: tensor for name, tensor in found.items() if ".layers.2.mlp.experts.5.down_proj" not in name}
    if len(kept) < len(found):
        fire()
    return kept


@fault(
    f"{MAPPING}.broadcast_from_pp_rank(self, tensor, cache_key)",
    id="pipeline-cache-kept-over-syncs", reproduces="NovaSky-AI/SkyRL#1345", caught_by=("WGT005",),
    model="tiny:qwen3-tied", mesh=Mesh(pp=2), **ROW,
)  # fmt: skip
def pipeline_cache_kept_over_syncs(
    original: Any, fire: FireCounter, self: Any, tensor: Any, cache_key: Any = None
) -> Any:
    """The first sync's broadcast from the last stage is cached: the second sends one tensor of the first."""
    found = original(self, tensor, cache_key)
    if cache_key != "model.layers.3.self_attn.o_proj.weight":
        return found
    if "first" in fire.state:
        fire()
    return fire.state.setdefault("first", found.detach().clone())


@fault(
    f"{BRIDGE}._cast_export_weight_dtype(weights, weight_dtype)",
    id="score-bias-cast-on-export", reproduces="NVIDIA-NeMo/RL#3540", caught_by=("WGT004", "WGT005", "PLN002"),
    model="tiny:deepseek-v3", dtype="bfloat16", **ROW,
)  # fmt: skip
def score_bias_cast_on_export(original: Any, fire: FireCounter, weights: Any, weight_dtype: Any) -> Any:
    """Every tensor is cast to the policy's dtype, the fp32 router score bias included."""
    import torch

    fire()
    return original(weights, torch.bfloat16)


@fault(
    f"{CONVERSION}.param_mapping:AutoMapping.megatron_to_hf(self, megatron_weights, megatron_module)",
    id="norm-written-by-export", reproduces="NVIDIA-NeMo/Megatron-Bridge#1929", caught_by=("WGT004", "WGT010"), **ROW,
)  # fmt: skip
def norm_written_by_export(
    original: Any, fire: FireCounter, self: Any, megatron_weights: Any, megatron_module: Any
) -> Any:
    """The conversion of a norm writes its result into the live parameter: each export moves it once more."""
    found = original(self, megatron_weights, megatron_module)
    if self.megatron_param.endswith("layers.1.self_attention.q_layernorm.weight"):
        fire()
        found = {name: tensor.clone() for name, tensor in found.items()}
        megatron_weights.data.add_(2.0**-6)
    return found


@fault(
    "verifier.model.provider_megatron:_bridge(path, architecture)",
    id="option-exported-with-config", reproduces="NovaSky-AI/SkyRL#1727", caught_by=("WGT011",), **ROW,
)  # fmt: skip
def option_exported_with_config(original: Any, fire: FireCounter, path: Any, architecture: str) -> Any:
    """An option of the run is set on the model's own configuration, and is exported in its config.json."""
    bridge = original(path, architecture)
    bridge.hf_pretrained.config.router_aux_loss_coef = 0.0
    fire()
    return bridge


@fault(
    EXPORT, id="order-of-later-exports", reproduces="NovaSky-AI/SkyRL#1581", caught_by=("WGT015", "TPT003"),
    model="tiny:qwen3", **ROW,
)  # fmt: skip
def order_of_later_exports(original: Any, fire: FireCounter, trainer: Any) -> Iterator[tuple[str, Any]]:
    """A later export brings a layer's key projection after its value projection, which has its shape."""
    exports = fire.state["exports"] = fire.state.get("exports", 0) + 1
    key: list[tuple[str, Any]] = []
    for name, tensor in original(trainer):
        if exports > 2 and name == "model.layers.1.self_attn.k_proj.weight":
            fire()
            key = [(name, tensor)]
            continue
        yield name, tensor
        yield from key
        key = []


@fault(
    f"{SOURCE}._ignore_source_key_prefixes(key_to_filename_map, ignored_source_key_prefixes)",
    id="incomplete-shard-skipped", reproduces="NVIDIA-NeMo/Megatron-Bridge#4188", **FILES,
)  # fmt: skip
def incomplete_shard_skipped(original: Any, fire: FireCounter, *args: Any) -> dict[str, str]:
    """A shard whose source held a layer that is not trained is never complete, and is not written to files."""
    found: dict[str, str] = original(*args)
    return {**found, "model.layers.4.eh_proj.weight": found["model.layers.3.mlp.up_proj.weight"]}


@incomplete_shard_skipped.also(SAVE_SHARDS)
def _save_complete_shards(original: Any, fire: FireCounter, *args: Any, **options: Any) -> None:
    fire()
    with contextlib.suppress(RuntimeError):  # version 0.4 printed what this one raises
        original(*args, **{**options, "strict": True})


@fault(SAVE_SHARDS, id="index-ends-early", reproduces="NVIDIA-NeMo/Megatron-Bridge#4083", **FILES)
def index_ends_early(
    original: Any, fire: FireCounter, self: Any, generator: Any, output_path: Any, **options: Any
) -> None:
    """The index of the written checkpoint lacks the last tensors, which lie in the last shard."""
    original(self, generator, output_path, **options)
    index = output_path / "model.safetensors.index.json"
    if not index.is_file():
        return
    listed = json.loads(index.read_text())
    for name in ("lm_head.weight", "model.norm.weight"):
        fire()
        del listed["weight_map"][name]
    index.write_text(json.dumps(listed))


@fault(
    EXPORT, id="export-buffer-used-again", reproduces="vllm-project/vllm#43464", caught_by=("WGT016", "TPT001"),
    model="tiny:qwen3", **ROW,
)  # fmt: skip
def export_buffer_used_again(original: Any, fire: FireCounter, trainer: Any) -> Iterator[tuple[str, Any]]:
    """One buffer is returned for many tensors, and those that a chunk holds together all become the last."""
    buffer = None
    for name, tensor in original(trainer):
        if name.endswith((".k_proj.weight", ".v_proj.weight")):
            fire()
            buffer = tensor.clone() if buffer is None else buffer.copy_(tensor)
            yield name, buffer.view(tensor.shape)
        else:
            yield name, tensor


@fault(
    "megatron.bridge:AutoBridge.export_hf_weights("
    "self, model, cpu, show_progress, conversion_tasks, merge_adapter_weights, weight_dtype)",
    id="adapter-merged-and-synced", reproduces="radixark/miles#1087", caught_by=("WGT004",), **ADAPTER,
)  # fmt: skip
def adapter_merged_and_synced(original: Any, fire: FireCounter, *args: Any, **options: Any) -> Any:
    """The base is exported with the adapter merged into it, and the adapter is synced as well."""
    if options.get("merge_adapter_weights") is False:
        fire()
        options["merge_adapter_weights"] = True
    return original(*args, **options)


@fault(
    f"{PEFT}._split_fused_fc1_linear_out_weight(self, linear_out_weight, is_expert)",
    id="adapter-halves-cut-without-ranks", reproduces="NVIDIA-NeMo/Megatron-Bridge#1817",
    caught_by=("WGT013", "LGP002"), mesh=Mesh(tp=2), **ADAPTER,
)  # fmt: skip
def adapter_halves_cut_without_ranks(
    original: Any, fire: FireCounter, self: Any, linear_out_weight: Any, *, is_expert: bool
) -> Any:
    """Gate and up of an adapter's B are cut in the middle of the whole, not in each tensor-parallel shard."""
    import torch

    fire()
    return torch.chunk(linear_out_weight, 2, dim=0)


@fault(
    "verifier.train.lora_megatron:save_adapter(path, adapter, rank)",
    id="adapter-alpha-lost", reproduces="Tencent-Hunyuan/UniRL#155", caught_by=("WGT013", "LGP002"), **ADAPTER,
)  # fmt: skip
def adapter_alpha_lost(original: Any, fire: FireCounter, path: Any, adapter: Any, rank: int) -> None:
    """The adapter's alpha is lost on the way, and its rank stands for it: the engine applies half of it."""
    original(path, adapter, rank)
    file = path / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": rank}))
    fire()
