"""Bugs of runs that train an adapter: its gradient, scale and version, and a base that is no longer the frozen one."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import NO_ENGINE, Fault, Fired, Side
from verifier.faults.inject import replaced
from verifier.mesh import Mesh

LORA = "vllm.lora"
PEFT = "megatron.bridge.models.conversion.peft_bridge:MegatronPeftBridge"
RANK = 8


@contextlib.contextmanager
def _scale_ignored(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def optimize(self: Any) -> Any:
            if self.scaling != 1:
                fired()
                self.scaling = 1
            return original(self)

        return optimize

    with replaced(f"{LORA}.lora_weights:LoRALayerWeights.optimize", "self", make):
        yield


@contextlib.contextmanager
def _first_served_again(fired: Fired) -> Iterator[None]:
    first: list[str] = []

    def make(original: Any) -> Any:
        def load(self: Any, lora_request: Any) -> Any:
            from vllm.lora.request import LoRARequest

            if not first:
                first.append(lora_request.lora_path)
            elif lora_request.lora_path != first[0]:
                fired()
                lora_request = LoRARequest(lora_request.lora_name, lora_request.lora_int_id, first[0])
            return original(self, lora_request)

        return load

    with replaced(f"{LORA}.worker_manager:WorkerLoRAManager._load_adapter", "self, lora_request", make):
        yield


@contextlib.contextmanager
def _merged_into_base(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def export(self: Any, model: Any, **options: Any) -> Any:
            if options.get("merge_adapter_weights") is False:
                fired()
                options["merge_adapter_weights"] = True
            return original(self, model, **options)

        return export

    with replaced(
        "megatron.bridge:AutoBridge.export_hf_weights",
        "self, model, cpu, show_progress, conversion_tasks, merge_adapter_weights, weight_dtype",
        make,
    ):
        yield


@contextlib.contextmanager
def _halves_cut_without_ranks(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def split(self: Any, linear_out_weight: Any, *, is_expert: bool) -> Any:
            import torch

            fired()
            return torch.chunk(linear_out_weight, 2, dim=0)

        return split

    with replaced(f"{PEFT}._split_fused_fc1_linear_out_weight", "self, linear_out_weight, is_expert", make):
        yield


@contextlib.contextmanager
def _alpha_lost(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def save(path: Any, adapter: Any, rank: int) -> None:
            original(path, adapter, rank)
            file = path / "adapter_config.json"
            file.write_text(json.dumps({**json.loads(file.read_text()), "lora_alpha": rank}))
            fired()

        return save

    with replaced("verifier.train.lora_megatron:save_adapter", "path, adapter, rank", make):
        yield


@contextlib.contextmanager
def _norm_left_trainable(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def freeze(self: Any, model: Any, training: bool = True) -> Any:
            frozen = original(self, model, training)
            for chunk in model:
                for name, parameter in chunk.named_parameters():
                    if name.endswith("layers.2.self_attention.q_layernorm.weight"):
                        parameter.requires_grad = True
                        fired()
            return frozen

        return freeze

    with replaced("megatron.bridge.peft.base:PEFT.freeze_model", "self, model, training", make):
        yield


@contextlib.contextmanager
def _gradient_of_own_rows(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def scatter(input_: Any, group: Any = None) -> Any:
            if input_.requires_grad:
                fired()
            return input_.chunk(group.size())[group.rank()].contiguous()

        return scatter

    with replaced("megatron.bridge.peft.utils:scatter_to_sequence_parallel_region", "input_, group", make):
        yield


def _fault(**fields: Any) -> Fault:
    return Fault(model="tiny:qwen3", engine="vllm", lora_rank=RANK, **fields)


FAULTS = (
    Fault(
        id="adapter-gradient-of-own-rows",
        stage=Stage.LOSS,
        reproduces="modelscope/mcore-bridge#173",
        summary="B of a row-parallel linear gets the gradient of its own rank's rows, and nobody sums it over ranks",
        caught_by=("LSS001",),
        inject=_gradient_of_own_rows,
        model="tiny:qwen3",
        mesh=Mesh(tp=2),
        engine=NO_ENGINE,
        lora_rank=RANK,
    ),
    _fault(
        id="adapter-scale-ignored",
        stage=Stage.ENGINE,
        reproduces="vllm-project/vllm#55545",
        summary="the engine does not take the adapter's scale from its configuration, and applies it with 1",
        caught_by=("ENG001", "LGP002"),
        inject=_scale_ignored,
        side=Side.ENGINE,
    ),
    _fault(
        id="adapter-of-first-version",
        stage=Stage.ENGINE,
        reproduces="vllm-project/vllm#42125",
        summary="an adapter that comes under a known name is taken for loaded: the second version is the first again",
        caught_by=("ENG001", "LGP002"),
        inject=_first_served_again,
        side=Side.ENGINE,
    ),
    _fault(
        id="adapter-merged-and-synced",
        stage=Stage.EXPORT,
        reproduces="radixark/miles#1087",
        summary="the base is exported with the adapter merged into it, and the adapter is synced as well",
        caught_by=("WGT004",),
        inject=_merged_into_base,
    ),
    _fault(
        id="adapter-halves-cut-without-ranks",
        stage=Stage.EXPORT,
        reproduces="NVIDIA-NeMo/Megatron-Bridge#1817",
        summary="gate and up of an adapter's B are cut in the middle of the whole, not in each tensor-parallel shard",
        caught_by=("WGT013", "LGP002"),
        inject=_halves_cut_without_ranks,
        mesh=Mesh(tp=2),
    ),
    _fault(
        id="adapter-alpha-lost",
        stage=Stage.EXPORT,
        reproduces="Tencent-Hunyuan/UniRL#155",
        summary="the adapter's alpha is lost on the way, and its rank stands for it: the engine applies half of it",
        caught_by=("WGT013", "LGP002"),
        inject=_alpha_lost,
    ),
    _fault(
        id="norm-trained-beside-adapter",
        stage=Stage.TRAIN,
        reproduces="pytorch/torchtitan#3438",
        summary="a norm of the frozen base is left trainable, and no sync of the adapter brings it to the engine",
        caught_by=("WGT012", "WGT004"),
        inject=_norm_left_trainable,
    ),
)
