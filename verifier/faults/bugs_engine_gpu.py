"""Bugs of the engine that only a GPU shows: memory that a sleeping engine gave up, and captured graphs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, Fired, Side
from verifier.faults.inject import replaced

WORKER = "vllm.v1.worker.gpu_worker:Worker"
RELOAD = "vllm.model_executor.model_loader.reload.layerwise"


@contextlib.contextmanager
def _buffers_dropped(fired: Fired) -> Iterator[None]:
    clean: dict[str, tuple[Any, Any]] = {}

    def make_sleep(original: Any) -> Any:
        def sleep(self: Any, level: int = 1) -> None:
            for name, buffer in self.model_runner.get_model().named_buffers():
                clean.setdefault(name, (buffer, buffer.data.clone()))
            original(self, level)
            if level == 2:
                self._sleep_saved_buffers = {}
                fired()

        return sleep

    def make_wake_up(original: Any) -> Any:
        def wake_up(self: Any, tags: list[str] | None = None) -> None:
            original(self, tags)
            if tags is None or "weights" in tags:
                for buffer, _ in clean.values():
                    buffer.data.zero_()  # what the memory holds; zeros make the trial repeatable

        return wake_up

    with (
        replaced(f"{WORKER}.sleep", "self, level", make_sleep),
        replaced(f"{WORKER}.wake_up", "self, tags", make_wake_up),
    ):
        try:
            yield
        finally:
            for buffer, contents in clean.values():
                buffer.data.copy_(contents)


@contextlib.contextmanager
def _storage_replaced(fired: Fired) -> Iterator[None]:
    live: list[tuple[Any, Any]] = []

    def make_start(original: Any) -> Any:
        def start_weight_update(self: Any, is_checkpoint_format: bool = True) -> None:
            if not live:
                layer = self.model_runner.get_model().get_submodule("model.layers.1.self_attn.o_proj")
                live.append((layer, layer.weight))
            original(self, is_checkpoint_format)

        return start_weight_update

    def make_copy(original: Any) -> Any:
        def copy_and_restore(layer: Any, info: Any) -> None:
            if any(layer is chosen for chosen, _ in live):
                fired()
                return
            original(layer, info)

        return copy_and_restore

    with (
        replaced(f"{WORKER}.start_weight_update", "self, is_checkpoint_format", make_start),
        replaced(f"{RELOAD}:_copy_and_restore_kernel_tensors", "layer, info", make_copy),
    ):
        try:
            yield
        finally:
            for layer, weight in live:
                weight.data.copy_(layer.weight.data)
                layer.weight = weight


FAULTS = (
    Fault(
        id="sleep-level-2-buffers",
        stage=Stage.ENGINE,
        reproduces="vllm-project/vllm#16564",
        summary="a sleep that drops the weights drops buffers too, and no update brings those back; the rotary table",
        caught_by=("ENG002", "LGP002"),
        inject=_buffers_dropped,
        side=Side.ENGINE,
        model="tiny:qwen3",
        engine="vllm",
        dtype="bfloat16",
        gpus=1,
    ),
    Fault(
        id="graph-reads-old-storage",
        stage=Stage.ROLLOUT,
        reproduces="vllm-project/vllm#48941",
        summary="a reload binds a weight to new memory, and captured graphs go on reading the old; one linear",
        caught_by=("LGP003",),
        inject=_storage_replaced,
        side=Side.ENGINE,
        model="tiny:qwen3",
        engine="vllm",
        dtype="bfloat16",
        gpus=1,
    ),
)
