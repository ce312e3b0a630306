"""Bugs of the engine that only a GPU shows: memory that a sleeping engine gave up, and captured graphs."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import FireCounter, Side, fault
from verifier.faults.reload_faults import RELOAD, START, WORKER, restore

ROW: dict[str, Any] = {
    "side": Side.ENGINE, "model": "tiny:qwen3", "engine": "vllm", "dtype": "bfloat16", "gpus": 1
}  # fmt: skip


@fault(
    f"{WORKER}.sleep(self, level)",
    id="sleep-level-2-buffers", stage=Stage.ENGINE, reproduces="vllm-project/vllm#16564",
    caught_by=("ENG002", "LGP002"), **ROW,
)  # fmt: skip
def sleep_level_2_buffers(original: Any, fire: FireCounter, self: Any, level: int = 1) -> None:
    """A sleep that drops the weights drops buffers too, and no update restores them; the rotary table."""
    clean = fire.state.setdefault("clean", {})
    for name, buffer in self.model_runner.get_model().named_buffers():
        if name not in clean:
            clean[name] = buffer
            fire.undo(restore, buffer, buffer.data.clone())
    original(self, level)
    if level == 2:
        self._sleep_saved_buffers = {}
        fire()


@sleep_level_2_buffers.also(f"{WORKER}.wake_up(self, tags)")
def _wake_up(original: Any, fire: FireCounter, self: Any, tags: list[str] | None = None) -> None:
    original(self, tags)
    if tags is None or "weights" in tags:
        for buffer in fire.state.get("clean", {}).values():
            buffer.data.zero_()  # what the memory holds; zeros make the trial repeatable


@fault(
    f"{RELOAD}:_copy_and_restore_kernel_tensors(layer, info)",
    id="graph-reads-old-storage", stage=Stage.ROLLOUT, reproduces="vllm-project/vllm#48941", caught_by=("LGP003",),
    **ROW,
)  # fmt: skip
def graph_reads_old_storage(original: Any, fire: FireCounter, layer: Any, info: Any) -> None:
    """A reload binds a weight to new memory, and captured graphs go on reading the old; one linear."""
    if layer is fire.state.get("layer"):
        fire()
    else:
        original(layer, info)


@graph_reads_old_storage.also(START)
def _remember_storage(original: Any, fire: FireCounter, self: Any, is_checkpoint_format: bool = True) -> None:
    if "layer" not in fire.state:
        layer = fire.state["layer"] = self.model_runner.get_model().get_submodule("model.layers.1.self_attn.o_proj")
        fire.undo(_restore_storage, layer, layer.weight)
    original(self, is_checkpoint_format)


def _restore_storage(layer: Any, weight: Any) -> None:
    weight.data.copy_(layer.weight.data)
    layer.weight = weight
