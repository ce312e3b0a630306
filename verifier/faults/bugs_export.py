"""Bugs of the export: live parameters to checkpoint tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, Fired
from verifier.faults.inject import replaced
from verifier.mesh import Mesh

CONVERSION = "megatron.bridge.models.conversion"
MAPPING = f"{CONVERSION}.param_mapping:MegatronParamMapping"
BRIDGE = f"{CONVERSION}.model_bridge:MegatronModelBridge"


@contextlib.contextmanager
def _experts_swapped(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def gather(self: Any, megatron_weights: Any, megatron_module: Any, hf_param_name: Any) -> Any:
            found = original(self, megatron_weights, megatron_module, hf_param_name)
            if any(".layers.1.mlp.experts.0.down_proj" in name for name in found):
                fired()
                names = list(found)
                found = dict(zip(names, [found[name] for name in reversed(names)], strict=True))
            return found

        return gather

    with replaced(f"{MAPPING}.gather_from_ep_ranks", "self, megatron_weights, megatron_module, hf_param_name", make):
        yield


@contextlib.contextmanager
def _experts_not_gathered(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def gather(self: Any, megatron_weights: Any, megatron_module: Any, hf_param_name: Any) -> Any:
            fired()
            return {str(hf_param_name): megatron_weights}

        return gather

    with replaced(f"{MAPPING}.gather_from_ep_ranks", "self, megatron_weights, megatron_module, hf_param_name", make):
        yield


@contextlib.contextmanager
def _expert_never_yielded(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def modify(self: Any, task: Any, converted_weights_dict: Any, hf_state_dict: Any) -> Any:
            found = original(self, task, converted_weights_dict, hf_state_dict)
            kept = {name: tensor for name, tensor in found.items() if ".layers.2.mlp.experts.5.down_proj" not in name}
            if len(kept) < len(found):
                fired()
            return kept

        return modify

    with replaced(
        f"{BRIDGE}.maybe_modify_converted_hf_weight", "self, task, converted_weights_dict, hf_state_dict", make
    ):
        yield


@contextlib.contextmanager
def _pipeline_cache_kept(fired: Fired) -> Iterator[None]:
    first: dict[str, Any] = {}

    def make(original: Any) -> Any:
        def broadcast(self: Any, tensor: Any, cache_key: Any = None) -> Any:
            found = original(self, tensor, cache_key)
            if cache_key != "model.layers.3.self_attn.o_proj.weight":
                return found
            if cache_key in first:
                fired()
            return first.setdefault(cache_key, found.detach().clone())

        return broadcast

    with replaced(f"{MAPPING}.broadcast_from_pp_rank", "self, tensor, cache_key", make):
        yield


@contextlib.contextmanager
def _score_bias_cast(fired: Fired) -> Iterator[None]:
    import torch

    def make(original: Any) -> Any:
        def cast(weights: Any, weight_dtype: Any) -> Any:
            fired()
            return original(weights, torch.bfloat16)

        return cast

    with replaced(f"{BRIDGE}._cast_export_weight_dtype", "weights, weight_dtype", make):
        yield


@contextlib.contextmanager
def _param_gather_skipped(fired: Fired) -> Iterator[None]:
    @contextlib.contextmanager
    def nothing(trainer: Any) -> Iterator[None]:
        fired()
        yield

    with replaced("verifier.export.gather_megatron:params_synced", "trainer", lambda original: nothing):
        yield


@contextlib.contextmanager
def _norm_written_in_place(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def to_hf(self: Any, megatron_weights: Any, megatron_module: Any) -> Any:
            found = original(self, megatron_weights, megatron_module)
            if self.megatron_param.endswith("layers.1.self_attention.q_layernorm.weight"):
                fired()
                found = {name: tensor.clone() for name, tensor in found.items()}
                megatron_weights.data.add_(2.0**-6)
            return found

        return to_hf

    with replaced(
        f"{CONVERSION}.param_mapping:AutoMapping.megatron_to_hf", "self, megatron_weights, megatron_module", make
    ):
        yield


@contextlib.contextmanager
def _option_set_on_config(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def open_bridge(path: Any, architecture: str) -> Any:
            bridge = original(path, architecture)
            bridge.hf_pretrained.config.router_aux_loss_coef = 0.0
            fired()
            return bridge

        return open_bridge

    with replaced("verifier.model.provider_megatron:_bridge", "path, architecture", make):
        yield


FAULTS = (
    Fault(
        id="ep-rank-experts-swapped",
        stage=Stage.EXPORT,
        reproduces="NVIDIA-NeMo/Megatron-Bridge#1716",
        summary="the experts that an all-gather over ep brings are named in the wrong rank order, for one local expert",
        caught_by=("WGT004", "WGT005"),
        inject=_experts_swapped,
        mesh=Mesh(tp=2, ep=2),
    ),
    Fault(
        id="export-before-param-gather",
        stage=Stage.EXPORT,
        reproduces="megatron-core 0.19.2, overlap_param_gather without disable_forward_pre_hook before an export",
        summary="the export reads parameters that the distributed optimizer has not yet gathered after its step",
        caught_by=("WGT005",),
        inject=_param_gather_skipped,
        model="tiny:qwen3",
        mesh=Mesh(dp=2),
    ),
    Fault(
        id="experts-not-gathered-over-ep",
        stage=Stage.EXPORT,
        reproduces="NVIDIA-NeMo/Megatron-Bridge#1871",
        summary="each rank exports the experts that it holds, and no other rank's",
        caught_by=("WGT004", "WGT006", "PLN001"),
        inject=_experts_not_gathered,
        mesh=Mesh(tp=2, ep=2),
    ),
    Fault(
        id="expert-never-yielded",
        stage=Stage.EXPORT,
        reproduces="NovaSky-AI/SkyRL#1471",
        summary="an expert whose group is split over two buckets is never yielded",
        caught_by=("WGT004", "WGT005", "PLN002", "ENG001"),
        inject=_expert_never_yielded,
    ),
    Fault(
        id="pipeline-cache-kept-over-syncs",
        stage=Stage.EXPORT,
        reproduces="NovaSky-AI/SkyRL#1345",
        summary="what the first sync broadcast from the last stage is cached: the second sends one tensor of the first",
        caught_by=("WGT005",),
        inject=_pipeline_cache_kept,
        model="tiny:qwen3-tied",
        mesh=Mesh(pp=2),
    ),
    Fault(
        id="score-bias-cast-on-export",
        stage=Stage.EXPORT,
        reproduces="NVIDIA-NeMo/RL#3540",
        summary="every tensor is cast to the policy's dtype, the fp32 router score bias included",
        caught_by=("WGT004", "WGT005", "PLN002"),
        inject=_score_bias_cast,
        model="tiny:deepseek-v3",
        dtype="bfloat16",
    ),
    Fault(
        id="norm-written-by-export",
        stage=Stage.EXPORT,
        reproduces="NVIDIA-NeMo/Megatron-Bridge#1929",
        summary="the conversion of a norm writes its result into the live parameter: each export moves it once more",
        caught_by=("WGT004", "WGT010"),
        inject=_norm_written_in_place,
    ),
    Fault(
        id="option-exported-with-config",
        stage=Stage.EXPORT,
        reproduces="NovaSky-AI/SkyRL#1727",
        summary="an option of the run is set on the model's own configuration, and is exported in its config.json",
        caught_by=("WGT011",),
        inject=_option_set_on_config,
    ),
)
