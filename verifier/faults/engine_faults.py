"""Bugs of the engine's weights: received tensors, or an adapter, to what a forward pass reads."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Call, Side, fault, held, kind

LAYERS = "vllm.model_executor.layers"
MOE = f"{LAYERS}.fused_moe"
LORA = "vllm.lora"
LOAD = "verifier.engine.engine_hf:HfEngine.load(self, tensors)"
ROW: dict[str, Any] = {"stage": Stage.ENGINE, "side": Side.ENGINE}
VLLM: dict[str, Any] = {**ROW, "engine": "vllm"}
ADAPTER: dict[str, Any] = {**VLLM, "model": "tiny:qwen3", "lora_rank": 8, "caught_by": ("ENG001", "LGP002")}


@kind(
    f"{MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.process_weights_after_loading(self, layer)",
    caught_by=("ENG001", "ENG002", "LGP002"), **VLLM,
)  # fmt: skip
def on_expert_weights(change: Callable[[Any], bool], call: Call) -> None:
    """Change the plain weights of vLLM's fused experts before they are packed: the function says if it did."""
    if change(call.layer):
        call.fire()
    call.original()


@kind("vllm.model_executor.models.qwen3_moe:Qwen3MoeModel.load_weights(self, weights)", **VLLM)
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


@fault(
    "sgl-project/sglang#30761", f"{LAYERS}.utils:dispatch_cpu_unquantized_gemm(layer, remove_weight)",
    "verifier.engine.vllm.stored_tensors_vllm:dispatch_cpu_unquantized_gemm(layer, remove_weight)",
    caught_by=("ENG001", "ENG003", "LGP002"), **VLLM,
)  # fmt: skip
def packing_latched(call: Call) -> None:
    """A flag says that a linear is packed, so later writes leave the packed copy as it was; one linear."""
    earlier = call.layer.__dict__.get("cpu_linear")
    call.original()
    if earlier is not None and getattr(call.layer, "prefix", "") == "model.layers.1.self_attn.o_proj":
        call.layer.cpu_linear = earlier
        call.fire()


@on_expert_weights("vllm-project/vllm#42821")
def expert_halves_swapped(layer: Any) -> bool:
    """A reload writes gate and up in the checkpoint's order, the kernel wants the other; all experts."""
    weight = layer.w13_weight.data
    weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))
    return True


@on_expert_weights("verl-project/verl#7986")
def same_shape_repack_missed(layer: Any) -> bool:
    """Rows stay in another order than the kernel's, as a test of shapes finds nothing to repack; one layer."""
    if layer.layer_name != "model.layers.2.mlp.experts":
        return False
    weight = layer.w2_weight.data
    weight.copy_(weight.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2))
    return True


@fault(
    "PrimeIntellect-ai/prime-rl#3583",
    f"{MOE}.layer:FusedMoE._map_global_expert_id_to_local_expert_id(self, expert_id)",
    caught_by=("ENG001", "ENG002"), **VLLM,
)  # fmt: skip
def expert_in_initial_slot(call: Call) -> int:
    """A reload puts experts where they were before a load balancer moved them; two experts of one layer."""
    if call.self.layer_name != "model.layers.1.mlp.experts" or call.expert_id not in (4, 11):
        return int(call.original())
    return int(call.faulty(expert_id=15 - call.expert_id))


@on_names("vllm-project/vllm#42803", caught_by=("ENG001", "ENG002", "LGP002"))
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


def _with_wrong(call: Call, name: str, wrong: Callable[[Any], Any]) -> Any:
    """Load the tensors, the one of this name as the function makes it."""
    received = dict(call.tensors)
    if name in received:
        call.fire()
        received[name] = wrong(received[name])
    return call.original(tensors=list(received.items()))


@fault("vllm-project/vllm#47777", LOAD, caught_by=("ENG001", "ENG002"), model="tiny:deepseek-v3", **ROW)
def router_bias_held_in_bf16(call: Call) -> Any:
    """The engine holds a router's float32 selection bias in its serving dtype; one layer."""
    name = "model.layers.2.mlp.gate.e_score_correction_bias"
    return _with_wrong(call, name, lambda bias: bias.bfloat16().to(bias.dtype))


@fault(
    "PrimeIntellect-ai/prime-rl#2714", LOAD, caught_by=("ENG001", "ENG002", "LGP002"), model="tiny:nemotron-h",
    fixes=("transformers-47246",), **ROW,
)  # fmt: skip
def mixer_d_dropped(call: Call) -> Any:
    """A reload loses the skip weight D of one state-space layer, which keeps its earlier values."""
    layers = call.self.model.model.layers
    return _with_wrong(call, "backbone.layers.4.mixer.D", lambda _: layers[4].mixer.D.data.clone())


@fault(
    "PrimeIntellect-ai/prime-rl#2823", LOAD, caught_by=("ENG001", "ENG002", "LGP002"), model="tiny:qwen3-tied", **ROW
)
def tied_head_cloned(call: Call) -> Any:
    """The engine's tied head is a copy of its own, and an update reaches the embedding alone."""
    if not call.state:
        import torch

        call.state["parted"] = True
        model = call.self.model
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.data.clone(), requires_grad=False)
        call.undo(lambda: setattr(model.lm_head, "weight", model.model.embed_tokens.weight))
    return call.faulty()


@fault(
    "vllm-project/vllm-gguf-plugin#103",
    "vllm.model_executor.parameter:_ColumnvLLMParameter.load_qkv_weight(self, loaded_weight, kwargs)",
    caught_by=("ENG001", "LGP002"), model="tiny:qwen3", engine_tp=2, **VLLM,
)  # fmt: skip
def first_shard_on_every_rank(call: Call) -> None:
    """A loader without its rank takes the first shard of fused query, key and value on every rank."""
    if call.self.tp_rank:
        call.fire()
    with held(call.self, tp_rank=0):
        call.original()


@fault("vllm-project/vllm#55545", f"{LORA}.lora_weights:LoRALayerWeights.optimize(self)", **ADAPTER)
def adapter_scale_ignored(call: Call) -> Any:
    """The engine does not take the adapter's scale from its configuration, and applies it with 1."""
    if call.self.scaling != 1:
        call.fire()
        call.self.scaling = 1
    return call.original()


@fault(
    "vllm-project/vllm#42125", f"{LORA}.worker_manager:WorkerLoRAManager._load_adapter(self, lora_request)", **ADAPTER
)
def adapter_of_first_version(call: Call) -> Any:
    """An adapter under a known name counts as loaded: the second version is the first again."""
    from vllm.lora.request import LoRARequest

    asked = call.lora_request
    first = call.state.setdefault("first", asked.lora_path)
    if asked.lora_path == first:
        return call.original()
    return call.faulty(lora_request=LoRARequest(asked.lora_name, asked.lora_int_id, first))
