"""Bugs of the engine's weights: received tensors, or an adapter, to what a forward pass reads; reloads and sleep."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Call
from verifier.stages.engine.faults_engine import RELOAD, START, on_gpu


@on_gpu(
    "vllm-project/vllm#48941", f"{RELOAD}:_copy_and_restore_kernel_tensors(layer, info)", stage=Stage.ROLLOUT,
    caught_by=("LGP003",),
)  # fmt: skip
def graph_reads_old_storage(call: Call) -> None:
    """A reload binds a weight to new memory, and captured graphs go on reading the old; one linear."""
    if call.layer is call.state.get("layer"):
        call.fire()
    else:
        call.original()


@graph_reads_old_storage.also(START)
def _remember_storage(call: Call) -> None:
    if "layer" not in call.state:
        layer = call.self.model_runner.get_model().get_submodule("model.layers.1.self_attn.o_proj")
        call.state["layer"] = layer
        call.undo(_restore_storage, layer, layer.weight)
    call.original()


def _restore_storage(layer: Any, weight: Any) -> None:
    weight.data.copy_(layer.weight.data)
    layer.weight = weight
