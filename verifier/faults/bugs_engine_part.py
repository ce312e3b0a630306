"""Bugs of the engine's reload that some of its ranks show, or some of its updates."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, Fired, Side
from verifier.faults.inject import replaced

RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
HEALTHY_UPDATES = 2
"""Of a trial: the one that restores the initial weights, and the first of a new version."""


@contextlib.contextmanager
def _first_shard_on_every_rank(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def load(self: Any, loaded_weight: Any, **where: Any) -> None:
            held, self.tp_rank = self.tp_rank, 0
            try:
                original(self, loaded_weight, **where)
            finally:
                self.tp_rank = held
            if held:
                fired()

        return load

    with replaced(
        "vllm.model_executor.parameter:_ColumnvLLMParameter.load_qkv_weight", "self, loaded_weight, kwargs", make
    ):
        yield


@contextlib.contextmanager
def _buffer_lost_later(fired: Fired) -> Iterator[None]:
    updates: list[int] = [0]
    clean: dict[str, tuple[Any, Any]] = {}

    def make_start(original: Any) -> Any:
        def start_weight_update(self: Any, is_checkpoint_format: bool = True) -> None:
            updates[0] += 1
            original(self, is_checkpoint_format)

        return start_weight_update

    def make_place(original: Any) -> Any:
        def place(layer: Any, info: Any) -> None:
            for name, buffer in info.kernel_tensors[1].items():
                if name == "cos_sin_cache" and updates[0] > HEALTHY_UPDATES:
                    clean.setdefault(name, (buffer, buffer.data.clone()))
                    buffer.data.zero_()  # what the allocation held
                    fired()
            original(layer, info)

        return place

    with (
        replaced("vllm.v1.worker.gpu_worker:Worker.start_weight_update", "self, is_checkpoint_format", make_start),
        replaced(f"{RELOAD}:_place_kernel_tensors", "layer, info", make_place),
    ):
        try:
            yield
        finally:
            for buffer, contents in clean.values():
                buffer.data.copy_(contents)


@contextlib.contextmanager
def _loaded_as_rank_0(fired: Fired) -> Iterator[None]:
    held: list[tuple[Any, int]] = []

    def make(original: Any) -> Any:
        def start_weight_update(self: Any, is_checkpoint_format: bool = True) -> None:
            layer = self.model_runner.get_model().get_submodule("model.layers.1.self_attn.o_proj")
            original(self, is_checkpoint_format)
            for owner in (layer, layer.weight):
                if owner.tp_rank:
                    held.append((owner, owner.tp_rank))
                    owner.tp_rank = 0
                    fired()

        return start_weight_update

    with replaced("vllm.v1.worker.gpu_worker:Worker.start_weight_update", "self, is_checkpoint_format", make):
        try:
            yield
        finally:
            for owner, rank in held:
                owner.tp_rank = rank


@contextlib.contextmanager
def _epsilon_default(fired: Fired) -> Iterator[None]:
    held: list[tuple[Any, float]] = []

    def make(original: Any) -> Any:
        def finish_weight_update(self: Any) -> None:
            original(self)
            norm = self.model_runner.get_model().get_submodule("model.layers.1.self_attn.q_norm")
            held.append((norm, norm.variance_epsilon))
            norm.variance_epsilon = 1e-5
            fired()

        return finish_weight_update

    with replaced("vllm.v1.worker.gpu_worker:Worker.finish_weight_update", "self", make):
        try:
            yield
        finally:
            for norm, epsilon in reversed(held):
                norm.variance_epsilon = epsilon


FAULTS = (
    Fault(
        id="first-shard-on-every-rank",
        stage=Stage.ENGINE,
        reproduces="vllm-project/vllm-gguf-plugin#103",
        summary="a loader that is not told its rank takes the first shard of fused query, key and value on every rank",
        caught_by=("ENG001", "LGP002"),
        inject=_first_shard_on_every_rank,
        side=Side.ENGINE,
        model="tiny:qwen3",
        engine="vllm",
        engine_tp=2,
    ),
    Fault(
        id="runtime-buffer-lost-later",
        stage=Stage.ENGINE,
        reproduces="vllm-project/vllm#44371",
        summary="the rotary table is right after the first update, and is lost in the second",
        caught_by=("ENG002", "LGP002"),
        inject=_buffer_lost_later,
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="loaded-as-rank-0",
        stage=Stage.ENGINE,
        reproduces="vllm-project/vllm#56949",
        summary="a rank takes itself for rank 0 in one linear: it loads that one's part, and says that it should",
        caught_by=("ENG006", "LGP002"),
        inject=_loaded_as_rank_0,
        side=Side.ENGINE,
        model="tiny:qwen3",
        engine="vllm",
        engine_tp=2,
    ),
    Fault(
        id="epsilon-default-after-reload",
        stage=Stage.ENGINE,
        reproduces="vllm-project/vllm#48312",
        summary="a reload builds a layer's constants anew, and one norm takes the default epsilon of its class",
        caught_by=("ENG005",),
        inject=_epsilon_default,
        side=Side.ENGINE,
        engine="vllm",
    ),
)
