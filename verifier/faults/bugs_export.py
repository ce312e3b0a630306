"""Bugs of the export: live parameters to checkpoint tensors."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, Fired
from verifier.faults.inject import replaced
from verifier.mesh import Mesh

CONVERSION = "megatron.bridge.models.conversion"
MAPPING = f"{CONVERSION}.param_mapping:MegatronParamMapping"
BRIDGE = f"{CONVERSION}.model_bridge:MegatronModelBridge"
SOURCE = "megatron.bridge.models.hf_pretrained.state:SafeTensorsStateSource"


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


@contextlib.contextmanager
def _later_order(fired: Fired) -> Iterator[None]:
    exports: list[None] = []

    def make(original: Any) -> Any:
        def export(trainer: Any) -> Iterator[tuple[str, Any]]:
            exports.append(None)
            key: list[tuple[str, Any]] = []
            for name, tensor in original(trainer):
                if len(exports) > 2 and name == "model.layers.1.self_attn.k_proj.weight":
                    fired()
                    key = [(name, tensor)]
                    continue
                yield name, tensor
                yield from key
                key = []

        return export

    with replaced("verifier.export.gather_megatron:export", "trainer", make):
        yield


@contextlib.contextmanager
def _buffer_used_again(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def export(trainer: Any) -> Iterator[tuple[str, Any]]:
            buffer = None
            for name, tensor in original(trainer):
                if name.endswith((".k_proj.weight", ".v_proj.weight")):
                    fired()
                    buffer = tensor.clone() if buffer is None else buffer.copy_(tensor)
                    yield name, buffer.view(tensor.shape)
                else:
                    yield name, tensor

        return export

    with replaced("verifier.export.gather_megatron:export", "trainer", make):
        yield


def _saved(make: Any) -> contextlib.AbstractContextManager[None]:
    """What writes the shards of a checkpoint and their index, replaced."""
    parameters = "self, generator, output_path, strict, distributed_save, save_every_n_ranks"
    return replaced(f"{SOURCE}.save_generator", f"{parameters}, ignored_source_key_prefixes", make)


@contextlib.contextmanager
def _incomplete_shard_skipped(fired: Fired) -> Iterator[None]:
    def expect(original: Any) -> Any:
        def expected(key_to_filename_map: Any, ignored_source_key_prefixes: Any) -> dict[str, str]:
            found: dict[str, str] = original(key_to_filename_map, ignored_source_key_prefixes)
            return {**found, "model.layers.4.eh_proj.weight": found["model.layers.3.mlp.up_proj.weight"]}

        return expected

    def make(original: Any) -> Any:
        def save(self: Any, generator: Any, output_path: Any, **options: Any) -> None:
            fired()
            with contextlib.suppress(RuntimeError):  # version 0.4 printed what this one raises
                original(self, generator, output_path, **{**options, "strict": True})

        return save

    parameters = "key_to_filename_map, ignored_source_key_prefixes"
    with replaced(f"{SOURCE}._ignore_source_key_prefixes", parameters, expect), _saved(make):
        yield


@contextlib.contextmanager
def _index_ends_early(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def save(self: Any, generator: Any, output_path: Any, **options: Any) -> None:
            original(self, generator, output_path, **options)
            index = output_path / "model.safetensors.index.json"
            if not index.is_file():
                return
            listed = json.loads(index.read_text())
            for name in ("lm_head.weight", "model.norm.weight"):
                fired()
                del listed["weight_map"][name]
            index.write_text(json.dumps(listed))

        return save

    with _saved(make):
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
    Fault(
        id="order-of-later-exports",
        stage=Stage.EXPORT,
        reproduces="NovaSky-AI/SkyRL#1581",
        summary="a later export brings a layer's key projection after its value projection, which has its shape",
        caught_by=("WGT015", "TPT003"),
        inject=_later_order,
        model="tiny:qwen3",
    ),
    Fault(
        id="incomplete-shard-skipped",
        stage=Stage.EXPORT,
        reproduces="NVIDIA-NeMo/Megatron-Bridge#4188",
        summary="a shard whose source held a layer that is not trained is never complete, and is not written to files",
        caught_by=("WGT014",),
        inject=_incomplete_shard_skipped,
        model="tiny:qwen3",
    ),
    Fault(
        id="index-ends-early",
        stage=Stage.EXPORT,
        reproduces="NVIDIA-NeMo/Megatron-Bridge#4083",
        summary="the index of the written checkpoint lacks the last tensors, which lie in the last shard",
        caught_by=("WGT014",),
        inject=_index_ends_early,
        model="tiny:qwen3",
    ),
    Fault(
        id="export-buffer-used-again",
        stage=Stage.EXPORT,
        reproduces="vllm-project/vllm#43464",
        summary="one buffer is handed out for many tensors, and those that are held for a chunk all become the last",
        caught_by=("WGT016", "TPT001"),
        inject=_buffer_used_again,
        model="tiny:qwen3",
    ),
)
