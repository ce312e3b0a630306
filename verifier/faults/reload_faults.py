"""Bugs of vLLM's layerwise reload: what it loses, repeats or does too early, in every update or in a later one."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Body, Fault, FireCounter, Side, fault

WORKER = "vllm.v1.worker.gpu_worker:Worker"
START = f"{WORKER}.start_weight_update(self, is_checkpoint_format)"
RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
PLACE = f"{RELOAD}:_place_kernel_tensors(layer, info)"
HEALTHY_UPDATES = 2
"""Updates of a trial before the second version: the initial weights restored, and the first version."""
ROW: dict[str, Any] = {"stage": Stage.ENGINE, "side": Side.ENGINE, "engine": "vllm"}
BUFFER: dict[str, Any] = {**ROW, "reproduces": "vllm-project/vllm#44371", "caught_by": ("ENG002", "LGP002")}


def on_module(path: str, **row: Any) -> Callable[[Body], Fault]:
    """Register a fault in the processing of one module: the function stands in for it, `original` is the right one."""

    def register(body: Body) -> Fault:
        @functools.wraps(body)
        def process(original: Any, fire: FireCounter, layer: Any, info: Any) -> None:
            if layer is fire.state.get("module"):
                body(original, fire, layer, info)
            else:
                original(layer, info)

        def start(original: Any, fire: FireCounter, self: Any, is_checkpoint_format: bool = True) -> None:
            fire.state["module"] = self.model_runner.model.get_submodule(path)
            original(self, is_checkpoint_format)

        found = fault(f"{RELOAD}:_layerwise_process(layer, info)", **ROW, **row)(process)
        found.also(START)(start)
        return found

    return register


def restore(buffer: Any, contents: Any) -> None:
    """Copy back the contents that a buffer had before the fault."""
    buffer.data.copy_(contents)


def _lose_rotary_table(fire: FireCounter, info: Any) -> None:
    """Overwrite the buffer that no checkpoint carries by what a fresh allocation could hold."""
    buffer = info.kernel_tensors[1].get("cos_sin_cache")
    if buffer is None:
        return
    if "lost" not in fire.state:
        fire.state["lost"] = True
        fire.undo(restore, buffer, buffer.data.clone())
    buffer.data.zero_()
    fire()


@fault(
    f"{WORKER}.update_weights(self, update_info)",
    id="reload-finished-per-chunk", reproduces="NovaSky-AI/SkyRL#1680", caught_by=("ENG001", "LGP002"), **ROW,
)  # fmt: skip
def reload_finished_per_chunk(original: Any, fire: FireCounter, self: Any, update_info: dict[str, Any]) -> None:
    """Every chunk is a reload of its own, whose end restores the layers that are not in the chunk."""
    import torch
    from vllm.model_executor.model_loader import reload

    original(self, update_info)
    model = self.model_runner.model
    with torch.device(self.device):
        reload.finalize_layerwise_reload(model, self.model_config)
        reload.initialize_layerwise_reload(model)
    fire()


@on_module(
    "model.layers.1.self_attn.k_norm",
    id="reload-drops-one-load", reproduces="PrimeIntellect-ai/prime-rl#2714", caught_by=("ENG001", "LGP002"),
)  # fmt: skip
def reload_drops_one_load(original: Any, fire: FireCounter, layer: Any, info: Any) -> None:
    """A reload allocates a parameter anew and loses its load, so it holds what the memory held; one norm."""
    info.loaded_weights.clear()
    original(layer, info)
    layer.weight.data.zero_()  # the fresh allocation holds anything; zeros make the trial repeatable
    fire()


@on_module(
    "model.layers.2.self_attn.q_norm",
    id="processing-applied-again", reproduces="vllm-project/vllm#48284", caught_by=("ENG001", "ENG002", "LGP002"),
)  # fmt: skip
def processing_applied_again(original: Any, fire: FireCounter, layer: Any, info: Any) -> None:
    """A reload transforms one parameter once more, A = -exp(A), as the processing is not idempotent."""
    original(layer, info)
    layer.weight.data.exp_().neg_()
    fire()


@fault(PLACE, id="runtime-buffer-lost", **BUFFER)
def runtime_buffer_lost(original: Any, fire: FireCounter, layer: Any, info: Any) -> None:
    """A reload copies fresh memory over a buffer that no checkpoint carries; the rotary table."""
    _lose_rotary_table(fire, info)
    original(layer, info)


@fault(PLACE, id="runtime-buffer-lost-later", **BUFFER)
def runtime_buffer_lost_later(original: Any, fire: FireCounter, layer: Any, info: Any) -> None:
    """The rotary table is right after the first update, and is lost in the second."""
    if fire.state.get("updates", 0) > HEALTHY_UPDATES:
        _lose_rotary_table(fire, info)
    original(layer, info)


@runtime_buffer_lost_later.also(START)
def _count_updates(original: Any, fire: FireCounter, self: Any, is_checkpoint_format: bool = True) -> None:
    fire.state["updates"] = fire.state.get("updates", 0) + 1
    original(self, is_checkpoint_format)


@fault(
    START, id="loaded-as-rank-0", reproduces="vllm-project/vllm#56949", caught_by=("ENG006", "LGP002"),
    model="tiny:qwen3", engine_tp=2, **ROW,
)  # fmt: skip
def loaded_as_rank_0(original: Any, fire: FireCounter, self: Any, is_checkpoint_format: bool = True) -> None:
    """A rank takes itself for rank 0 in one linear: it loads that rank's part, and reports that it should."""
    layer = self.model_runner.get_model().get_submodule("model.layers.1.self_attn.o_proj")
    original(self, is_checkpoint_format)
    for owner in (layer, layer.weight):
        if owner.tp_rank:
            fire.undo(setattr, owner, "tp_rank", owner.tp_rank)
            owner.tp_rank = 0
            fire()


@fault(
    f"{WORKER}.finish_weight_update(self)",
    id="epsilon-default-after-reload", reproduces="vllm-project/vllm#48312", caught_by=("ENG005",), **ROW,
)  # fmt: skip
def epsilon_default_after_reload(original: Any, fire: FireCounter, self: Any) -> None:
    """A reload rebuilds a layer's constants, and one norm takes the default epsilon of its class."""
    original(self)
    norm = self.model_runner.get_model().get_submodule("model.layers.1.self_attn.q_norm")
    fire.undo(setattr, norm, "variance_epsilon", norm.variance_epsilon)
    norm.variance_epsilon = 1e-5
    fire()
