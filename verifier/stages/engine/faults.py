"""Bugs of the engine's weights: received tensors, or an adapter, to what a forward pass reads; reloads and sleep."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable, Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import HF_SAMPLES, Call, Register, Side, fault, held, in_training, kind
from verifier.stages.transport.faults import LIVE

LAYERS = "vllm.model_executor.layers"
MOE = f"{LAYERS}.fused_moe"
PLACES = f"{MOE}.layer:FusedMoE._map_global_expert_id_to_local_expert_id(self, expert_id)"
LORA = "vllm.lora"
LOAD = "verifier.engine.engine_hf:HfEngine.load(self, tensors)"
WORKER = "vllm.v1.worker.gpu_worker:Worker"
START = f"{WORKER}.start_weight_update(self, is_checkpoint_format)"
RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
PROCESS = f"{RELOAD}:_layerwise_process(layer, info)"
PLACE = f"{RELOAD}:_place_kernel_tensors(layer, info)"
ALL = ("ENG001", "ENG002", "LGP002")
in_hf = functools.partial(fault, stage=Stage.ENGINE, side=Side.ENGINE, caught_by=ALL)
in_vllm = functools.partial(in_hf, engine="vllm")
in_adapter = functools.partial(in_vllm, model="tiny:qwen3", lora_rank=8, caught_by=("ENG001", "LGP002"))
on_gpu = functools.partial(in_vllm, model="tiny:qwen3", dtype="bfloat16", gpus=1)


@kind(
    "vllm.model_executor.models.qwen3_moe:Qwen3MoeModel.load_weights(self, weights)",
    stage=Stage.ENGINE, side=Side.ENGINE, caught_by=ALL, engine="vllm",
)  # fmt: skip
def on_names(change: Callable[[str], str], call: Call) -> Any:
    """Map names wrongly in vLLM: the function returns another name, or none to skip the tensor."""

    def mapped() -> Iterator[tuple[str, Any]]:
        for name, tensor in call.weights:
            found = change(name)
            if found != name:
                call.fire()
            if found:
                yield found, tensor

    return call.original(weights=mapped())


@in_vllm(
    "sgl-project/sglang#30761", f"{LAYERS}.utils:dispatch_cpu_unquantized_gemm(layer, remove_weight)",
    "verifier.engine.vllm.stored_tensors_vllm:dispatch_cpu_unquantized_gemm(layer, remove_weight)",
    caught_by=("ENG001", "ENG003", "LGP002"),
)  # fmt: skip
def packing_latched(call: Call) -> None:
    """A flag says that a linear is packed, so later writes leave the packed copy as it was; one linear."""
    earlier = call.layer.__dict__.get("cpu_linear")
    call.original()
    if earlier is not None and getattr(call.layer, "prefix", "") == "model.layers.1.self_attn.o_proj":
        call.layer.cpu_linear = earlier
        call.fire()


@in_vllm(
    "verl-project/verl#7986",
    f"{MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.process_weights_after_loading(self, layer)",
)
def same_shape_repack_missed(call: Call) -> None:
    """Rows stay in another order than the kernel's, as a test of shapes finds nothing to repack; one layer."""
    if call.layer.layer_name == "model.layers.2.mlp.experts":
        call.fire()
        weight = call.layer.w2_weight.data
        weight.copy_(weight.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))
    call.original()


@in_vllm("vllm-project/vllm#28715", PLACES, engine_tp=2, engine_ep=2)
def experts_of_the_rank_before(call: Call) -> int:
    """The first expert of a rank is that of the rank before it, whose experts a reload puts in this one's places."""
    layer = call.self
    if not layer.ep_rank:
        return int(call.original())
    return int(call.faulty(expert_id=(call.expert_id + layer.local_num_experts) % layer.global_num_experts))


@in_vllm(
    "sgl-project/sglang#37216", "vllm.model_executor.models.qwen2:Qwen2Model.load_weights(self, weights)",
    model="tiny:qwen3", engine_pp=2,
)  # fmt: skip
def layers_of_the_stage_before(call: Call) -> Any:
    """The key of what a rank gets leaves its stage out: a sync gives the second stage the layers of the first."""
    first = call.self.start_layer

    def taken() -> Iterator[tuple[str, Any]]:
        for name, tensor in call.weights:
            kind, number, *leaf = name.split(".")
            if not first or kind != "layers":
                yield name, tensor
            elif int(number) < first:
                call.fire()
                yield ".".join([kind, str(int(number) + first), *leaf]), tensor

    return call.original(weights=taken())


@on_names("vllm-project/vllm#42803")
def fused_shards_exchanged(name: str) -> str:
    """Rows of one projection take another's place in the fused qkv weight; keys for values in one layer."""
    swapped = {"k_proj": "v_proj", "v_proj": "k_proj"}
    *parents, leaf, weight = name.split(".")
    if parents != ["layers", "1", "self_attn"]:
        return name
    return ".".join([*parents, swapped.get(leaf, leaf), weight])


@on_names("PrimeIntellect-ai/prime-rl#2326", caught_by=("ENG001", "ENG004", "LGP002"))
def unknown_name_skipped(name: str) -> str:
    """The loader does not know the name of a router's weight and goes on without it; one layer."""
    return "" if name == "layers.2.mlp.gate.weight" else name


@in_hf("PrimeIntellect-ai/prime-rl#2823", LOAD, model="tiny:qwen3-tied")
def tied_head_cloned(call: Call) -> Any:
    """The engine's tied head is a copy of its own, and an update reaches the embedding alone."""
    if not call.state:
        import torch

        call.state["parted"] = True
        model = call.self.model
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone(), requires_grad=False)
        call.undo(lambda: setattr(model.lm_head, "weight", model.model.embed_tokens.weight))
    return call.faulty()


@in_hf(
    "sgl-project/sglang#30247 (found in review)", "torch.nn.modules.sparse:Embedding.forward(self, input)",
    model="tiny:qwen3", caught_by=("ENG002", "LGP002"),
)  # fmt: skip
def weight_cached_by_its_place(call: Call) -> Any:
    """A layer keeps a copy of its weight beside the place of its memory, which an update in place leaves as it is."""
    import torch

    layer = call.self
    if "kept" not in vars(layer):
        layer.kept = (layer.weight.data_ptr(), layer.weight.detach().clone())
        call.undo(delattr, layer, "kept")
    place, copy = layer.kept
    if place != layer.weight.data_ptr() or torch.equal(copy, layer.weight):
        return call.original()
    return call.wrong(torch.nn.functional.embedding(call.input, copy))


@in_adapter("vllm-project/vllm#55545", f"{LORA}.lora_weights:LoRALayerWeights.optimize(self)")
def adapter_scale_ignored(call: Call) -> Any:
    """The engine does not take the adapter's scale from its configuration, and applies it with 1."""
    if call.self.scaling != 1:
        call.fire()
        call.self.scaling = 1
    return call.original()


@in_adapter("vllm-project/vllm#42125", f"{LORA}.worker_manager:WorkerLoRAManager._load_adapter(self, lora_request)")
def adapter_of_first_version(call: Call) -> Any:
    """An adapter under a known name counts as loaded: the second version is the first again."""
    from vllm.lora.request import LoRARequest

    asked = call.lora_request
    first = call.state.setdefault("first", asked.lora_path)
    if asked.lora_path == first:
        return call.original()
    return call.faulty(lora_request=LoRARequest(asked.lora_name, asked.lora_int_id, first))


@in_adapter(
    "vllm-project/vllm#25487",
    f"{LORA}.layers.row_parallel_linear:RowParallelLinearWithLoRA.slice_lora_a(self, lora_a)", engine_tp=2,
)  # fmt: skip
def adapter_cut_as_rank_0(call: Call) -> Any:
    """An adapter's layer has a rank of its own beside its linear's, and cuts A as rank 0 on every rank; one layer."""
    layer = call.self
    if not layer.tp_rank or layer.base_layer.prefix != "model.layers.1.self_attn.o_proj":
        return call.original()
    with held(layer, tp_rank=0):
        return call.faulty()


def _restore(buffer: Any, contents: Any) -> None:
    buffer.data.copy_(contents)


def _processed(call: Call, path: str) -> bool:
    return "model" in call.state and call.layer is call.state["model"].get_submodule(path)


@in_vllm("PrimeIntellect-ai/prime-rl#2714", PROCESS, caught_by=("ENG001", "LGP002"))
def reload_drops_one_load(call: Call) -> None:
    """A reload allocates a parameter anew and loses its load, so it holds what the memory held; one norm."""
    dropped = _processed(call, "model.layers.1.self_attn.k_norm")
    if dropped:
        call.fire()
        call.info.loaded_weights.clear()
    call.original()
    if dropped:
        call.layer.weight.data.zero_()  # the fresh allocation holds anything; zeros make the trial repeatable


@in_vllm("vllm-project/vllm#48284", PROCESS)
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


@in_vllm("vllm-project/vllm#44371", PLACE, caught_by=("ENG002", "LGP002"))
def runtime_buffer_lost(call: Call) -> None:
    """A reload copies fresh memory over a buffer that no checkpoint carries; the rotary table."""
    buffer = call.info.kernel_tensors[1].get("cos_sin_cache")
    if buffer is not None:
        if "lost" not in call.state:
            call.state["lost"] = True
            call.undo(_restore, buffer, buffer.data.clone())
        buffer.data.zero_()
        call.fire()
    call.original()


@in_vllm("vllm-project/vllm#56949", START, caught_by=("ENG001", "LGP002"), model="tiny:qwen3", engine_tp=2)
def loaded_as_rank_0(call: Call) -> None:
    """A rank takes itself for rank 0 in one linear: it loads that rank's part, and reports that it should."""
    layer = call.self.model_runner.get_model().get_submodule("model.layers.1.self_attn.o_proj")
    call.original()
    for owner in (layer, layer.weight):
        if owner.tp_rank:
            call.undo(setattr, owner, "tp_rank", owner.tp_rank)
            owner.tp_rank = 0
            call.fire()


@on_gpu("vllm-project/vllm#16564", f"{WORKER}.sleep(self, level)", caught_by=("ENG002", "LGP002"))
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


def in_constants(reproduces: str, **row: Any) -> Register:
    """Register a fault that sets a constant of vLLM's model where an update ends."""
    return in_vllm(reproduces, f"{WORKER}.finish_weight_update(self)", **row)


@in_constants("vllm-project/vllm#48312", caught_by=("ENG005",))
def epsilon_default_after_reload(call: Call) -> None:
    """A reload rebuilds a layer's constants, and one norm takes the default epsilon of its class."""
    call.faulty()
    norm = call.self.model_runner.get_model().get_submodule("model.layers.1.self_attn.q_norm")
    call.undo(setattr, norm, "variance_epsilon", norm.variance_epsilon)
    norm.variance_epsilon = 1e-5


@in_constants("vllm-project/vllm#21863", caught_by=("ENG007",), model="tiny:gemma2", fixes=("bridge-5712",))
def window_on_a_layer_without(call: Call) -> None:
    """A layer that sees all gets the window of the others; no sample is as long as it."""
    call.faulty()
    attention = call.self.model_runner.get_model().get_submodule("model.layers.1.self_attn.attn").impl
    call.undo(setattr, attention, "sliding_window", attention.sliding_window)
    attention.sliding_window = (1022, 0)


@in_constants(
    "vllm-project/vllm#52173", caught_by=("ENG007", "LGP002"), model="tiny:gemma2", fixes=("bridge-5712",)
)  # fmt: skip
def logits_of_an_engine_without_bound(call: Call) -> None:
    """The engine does not bend its logits to the bound of config.json, which changes no order of tokens."""
    call.faulty()
    processor = call.self.model_runner.get_model().logits_processor
    call.undo(setattr, processor, "soft_cap", processor.soft_cap)
    processor.soft_cap = None


@in_constants("vllm-project/vllm#48621", caught_by=("ENG007", "ENG002", "LGP002"), model="tiny:qwen3-yarn")
def rope_stretched_without_its_magnitude(call: Call) -> None:
    """Sines and cosines of a rope that YaRN stretches have another factor than the config asks for: 1 here."""
    call.faulty()
    rope = call.self.model_runner.get_model().get_submodule("model.layers.0.self_attn.rotary_emb")
    table = rope.cos_sin_cache
    call.undo(setattr, rope, "mscale", rope.mscale)
    call.undo(table.copy_, table.clone())
    table.div_(rope.mscale)
    rope.mscale = 1.0


SAMPLING = (*HF_SAMPLES, "grpo.max_answer_tokens=8", "grpo.entropy_weight=1.0", "optimizer.warmup_steps=0")
in_driver = functools.partial(in_training, stage=Stage.ENGINE, side=Side.DRIVER, training=SAMPLING)
ENGINE = "verifier.engine.engine_hf:HfEngine"


@in_driver("huggingface/trl#5312", f"{ENGINE}.generate(self, prompts, sampling)", caught_by=("ENG009", "LGP009"))
def checkpoint_read_again_when_asked(call: Call) -> Any:
    """An engine that wakes to sample reads its checkpoint once more, over the weights that the sync has brought."""
    state = call.self.model.state_dict()
    if "read" not in call.state:
        call.state["read"] = {name: tensor.clone() for name, tensor in state.items()}
        return call.original()
    for name, tensor in state.items():
        tensor.copy_(call.state["read"][name])
    return call.faulty()


@in_training(
    "radixark/miles#1724", "verifier.trainer.engines:Revival.repeated(self, function, version)", stage=Stage.ENGINE,
    side=Side.CONTROLLER, caught_by=("ENG001", "LGP009"), training=LIVE,
)  # fmt: skip
def restarted_engine_answers_before_its_sync(call: Call) -> Any:
    """An engine that died is asked as soon as it runs again, and answers by the checkpoint that the run began with."""
    from verifier.engine.client import EngineGone

    engines = call.self.engines
    if call.version != 1 or engines.restarted:
        return call.original()
    os.kill(engines.pids[0], signal.SIGKILL)
    try:
        return call.function()
    except EngineGone as problem:
        call.self.revive(problem)
    return call.wrong(call.function())
