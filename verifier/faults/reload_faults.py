"""Bugs of vLLM's layerwise reload and sleep: what is lost, repeated or done too early, at once or in a later update."""

from __future__ import annotations

from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Call, Side, fault

WORKER = "vllm.v1.worker.gpu_worker:Worker"
START = f"{WORKER}.start_weight_update(self, is_checkpoint_format)"
RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
PROCESS = f"{RELOAD}:_layerwise_process(layer, info)"
PLACE = f"{RELOAD}:_place_kernel_tensors(layer, info)"
HEALTHY_UPDATES = 2
"""Updates of a trial before the second version: the initial weights restored, and the first version."""
ROW: dict[str, Any] = {"stage": Stage.ENGINE, "side": Side.ENGINE, "engine": "vllm"}
BUFFER: dict[str, Any] = {**ROW, "caught_by": ("ENG002", "LGP002")}
GPU: dict[str, Any] = {"model": "tiny:qwen3", "dtype": "bfloat16", "gpus": 1}


def _restore(buffer: Any, contents: Any) -> None:
    buffer.data.copy_(contents)


def _lose_rotary_table(call: Call) -> None:
    """Overwrite the buffer that no checkpoint carries by what a fresh allocation could hold."""
    buffer = call.info.kernel_tensors[1].get("cos_sin_cache")
    if buffer is None:
        return
    if "lost" not in call.state:
        call.state["lost"] = True
        call.undo(_restore, buffer, buffer.data.clone())
    buffer.data.zero_()
    call.fire()


@fault("NovaSky-AI/SkyRL#1680", f"{WORKER}.update_weights(self, update_info)", caught_by=("ENG001", "LGP002"), **ROW)
def reload_finished_per_chunk(call: Call) -> None:
    """Every chunk is a reload of its own, whose end restores the layers that are not in the chunk."""
    import torch
    from vllm.model_executor.model_loader import reload

    call.faulty()
    model = call.self.model_runner.model
    with torch.device(call.self.device):
        reload.finalize_layerwise_reload(model, call.self.model_config)
        reload.initialize_layerwise_reload(model)


def _processed(call: Call, path: str) -> bool:
    """Tell if this call processes the module at a path of the model that is reloaded."""
    return "model" in call.state and call.layer is call.state["model"].get_submodule(path)


@fault("PrimeIntellect-ai/prime-rl#2714", PROCESS, caught_by=("ENG001", "LGP002"), **ROW)
def reload_drops_one_load(call: Call) -> None:
    """A reload allocates a parameter anew and loses its load, so it holds what the memory held; one norm."""
    dropped = _processed(call, "model.layers.1.self_attn.k_norm")
    if dropped:
        call.fire()
        call.info.loaded_weights.clear()
    call.original()
    if dropped:
        call.layer.weight.data.zero_()  # the fresh allocation holds anything; zeros make the trial repeatable


@fault("vllm-project/vllm#48284", PROCESS, caught_by=("ENG001", "ENG002", "LGP002"), **ROW)
def processing_applied_again(call: Call) -> None:
    """A reload transforms one parameter once more, A = -exp(A), as the processing is not idempotent."""
    call.original()
    if _processed(call, "model.layers.2.self_attn.q_norm"):
        call.fire()
        call.layer.weight.data.exp_().neg_()


@reload_drops_one_load.also(START)
@processing_applied_again.also(START)
def _remember_model(call: Call) -> None:
    call.state["model"] = call.self.model_runner.model
    call.original()


@fault("vllm-project/vllm#44371", PLACE, **BUFFER)
def runtime_buffer_lost(call: Call) -> None:
    """A reload copies fresh memory over a buffer that no checkpoint carries; the rotary table."""
    _lose_rotary_table(call)
    call.original()


@fault("vllm-project/vllm#44371", PLACE, **BUFFER)
def runtime_buffer_lost_later(call: Call) -> None:
    """The rotary table is right after the first update, and is lost in the second."""
    if call.state.get("updates", 0) > HEALTHY_UPDATES:
        _lose_rotary_table(call)
    call.original()


@runtime_buffer_lost_later.also(START)
def _count_updates(call: Call) -> None:
    call.state["updates"] = call.state.get("updates", 0) + 1
    call.original()


@fault("vllm-project/vllm#56949", START, caught_by=("ENG006", "LGP002"), model="tiny:qwen3", engine_tp=2, **ROW)
def loaded_as_rank_0(call: Call) -> None:
    """A rank takes itself for rank 0 in one linear: it loads that rank's part, and reports that it should."""
    layer = call.self.model_runner.get_model().get_submodule("model.layers.1.self_attn.o_proj")
    call.original()
    for owner in (layer, layer.weight):
        if owner.tp_rank:
            call.undo(setattr, owner, "tp_rank", owner.tp_rank)
            owner.tp_rank = 0
            call.fire()


@fault("vllm-project/vllm#48312", f"{WORKER}.finish_weight_update(self)", caught_by=("ENG005",), **ROW)
def epsilon_default_after_reload(call: Call) -> None:
    """A reload rebuilds a layer's constants, and one norm takes the default epsilon of its class."""
    call.faulty()
    norm = call.self.model_runner.get_model().get_submodule("model.layers.1.self_attn.q_norm")
    call.undo(setattr, norm, "variance_epsilon", norm.variance_epsilon)
    norm.variance_epsilon = 1e-5


@fault("vllm-project/vllm#16564", f"{WORKER}.sleep(self, level)", **BUFFER, **GPU)
def sleep_level_2_buffers(call: Call) -> None:
    """A sleep that drops the weights drops buffers too, and no update restores them; the rotary table."""
    clean = call.state.setdefault("clean", {})
    for name, buffer in call.self.model_runner.get_model().named_buffers():
        if name not in clean:
            clean[name] = buffer
            call.undo(_restore, buffer, buffer.data.clone())
    call.original()
    if call.level == 2:
        call.self._sleep_saved_buffers = {}
        call.fire()


@sleep_level_2_buffers.also(f"{WORKER}.wake_up(self, tags)")
def _wake_up(call: Call) -> None:
    call.original()
    if call.tags is None or "weights" in call.tags:
        for buffer in call.state.get("clean", {}).values():
            buffer.data.zero_()  # what the memory holds; zeros make the trial repeatable


@fault(
    "vllm-project/vllm#48941", f"{RELOAD}:_copy_and_restore_kernel_tensors(layer, info)",
    **{**ROW, "stage": Stage.ROLLOUT}, caught_by=("LGP003",), **GPU,
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
