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
)
