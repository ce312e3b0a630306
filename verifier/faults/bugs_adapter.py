"""Bugs of runs that train an adapter: its scale, its version, and a base that is no longer the frozen one."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, Fired, Side
from verifier.faults.inject import replaced

LORA = "vllm.lora"
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


def _fault(**fields: Any) -> Fault:
    return Fault(model="tiny:qwen3", engine="vllm", lora_rank=RANK, **fields)


FAULTS = (
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
)
