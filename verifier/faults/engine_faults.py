"""Bugs of the engine's weights: received tensors, or an adapter, to what a forward pass reads."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, FireCounter, Side, fault

LAYERS = "vllm.model_executor.layers"
MOE = f"{LAYERS}.fused_moe"
LORA = "vllm.lora"
ROW: dict[str, Any] = {"stage": Stage.ENGINE, "side": Side.ENGINE}
VLLM: dict[str, Any] = {**ROW, "engine": "vllm"}
ADAPTER: dict[str, Any] = {**VLLM, "model": "tiny:qwen3", "lora_rank": 8, "caught_by": ("ENG001", "LGP002")}


def on_expert_weights(**row: Any) -> Callable[[Callable[[Any], bool]], Fault]:
    """Register a fault in vLLM's fused experts: the function changes their plain weights before they are packed.

    The function returns whether it changed the layer.
    """

    def register(change: Callable[[Any], bool]) -> Fault:
        @functools.wraps(change)
        def process(original: Any, fire: FireCounter, self: Any, layer: Any) -> None:
            if change(layer):
                fire()
            original(self, layer)

        method = f"{MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.process_weights_after_loading"
        return fault(f"{method}(self, layer)", caught_by=("ENG001", "ENG002", "LGP002"), **VLLM, **row)(process)

    return register


def on_names(**row: Any) -> Callable[[Callable[[str], str]], Fault]:
    """Register a fault in vLLM's mapping of names: the function returns another name, or none to skip the tensor."""

    def register(change: Callable[[str], str]) -> Fault:
        @functools.wraps(change)
        def load_weights(original: Any, fire: FireCounter, self: Any, weights: Any) -> Any:
            def mapped() -> Iterator[tuple[str, Any]]:
                for name, tensor in weights:
                    found = change(name)
                    if found != name:
                        fire()
                    if found:
                        yield found, tensor

            return original(self, mapped())

        target = "vllm.model_executor.models.qwen3_moe:Qwen3MoeModel.load_weights(self, weights)"
        return fault(target, **VLLM, **row)(load_weights)

    return register


def on_loaded(chosen: str, **row: Any) -> Callable[[Callable[[Any, Any], Any]], Fault]:
    """Register a fault of transformers' engine: the function returns the wrong tensor of this name.

    It gets the engine's model and the tensor that came.
    """

    def register(change: Callable[[Any, Any], Any]) -> Fault:
        @functools.wraps(change)
        def load(original: Any, fire: FireCounter, self: Any, tensors: list[tuple[str, Any]]) -> Any:
            received = dict(tensors)
            if chosen in received:
                fire()
                received[chosen] = change(self.model, received[chosen])
            return original(self, list(received.items()))

        return fault("verifier.engine.engine_hf:HfEngine.load(self, tensors)", **ROW, **row)(load)

    return register


@fault(
    f"{LAYERS}.utils:dispatch_cpu_unquantized_gemm(layer, remove_weight)",
    "verifier.engine.vllm.stored_tensors_vllm:dispatch_cpu_unquantized_gemm(layer, remove_weight)",
    id="packing-latched", reproduces="sgl-project/sglang#30761", caught_by=("ENG001", "ENG003", "LGP002"), **VLLM,
)  # fmt: skip
def packing_latched(original: Any, fire: FireCounter, layer: Any, remove_weight: bool) -> None:
    """A flag says that a linear is packed, so later writes leave the packed copy as it was; one linear."""
    earlier = layer.__dict__.get("cpu_linear")
    original(layer, remove_weight)
    if earlier is not None and getattr(layer, "prefix", "") == "model.layers.1.self_attn.o_proj":
        layer.cpu_linear = earlier
        fire()


@on_expert_weights(id="expert-halves-swapped", reproduces="vllm-project/vllm#42821")
def expert_halves_swapped(layer: Any) -> bool:
    """A reload writes gate and up in the checkpoint's order, the kernel wants the other; all experts."""
    weight = layer.w13_weight.data
    weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))
    return True


@on_expert_weights(id="same-shape-repack-missed", reproduces="verl-project/verl#7986")
def same_shape_repack_missed(layer: Any) -> bool:
    """Rows stay in another order than the kernel's, as a test of shapes finds nothing to repack; one layer."""
    import torch

    if layer.layer_name != "model.layers.2.mlp.experts":
        return False
    weight = layer.w2_weight.data
    rows = weight.shape[1]
    order = torch.arange(rows).view(2, rows // 2).t().reshape(-1)
    weight.copy_(weight[:, order].clone())
    return True


@fault(
    f"{MOE}.layer:FusedMoE._map_global_expert_id_to_local_expert_id(self, expert_id)",
    id="expert-in-initial-slot", reproduces="PrimeIntellect-ai/prime-rl#3583", caught_by=("ENG001", "ENG002"), **VLLM,
)  # fmt: skip
def expert_in_initial_slot(original: Any, fire: FireCounter, self: Any, expert_id: int) -> int:
    """A reload puts experts where they were before a load balancer moved them; two experts of one layer."""
    found = int(original(self, expert_id))
    if self.layer_name != "model.layers.1.mlp.experts" or expert_id not in (4, 11):
        return found
    fire()
    return int(original(self, 15 - expert_id))


@on_names(id="fused-shards-exchanged", reproduces="vllm-project/vllm#42803", caught_by=("ENG001", "ENG002", "LGP002"))
def fused_shards_exchanged(name: str) -> str:
    """Rows of one projection take another's place in the fused qkv weight; keys for values in one layer."""
    swapped = {"k_proj": "v_proj", "v_proj": "k_proj"}
    *parents, leaf, weight = name.split(".")
    if parents != ["layers", "1", "self_attn"]:
        return name
    return ".".join([*parents, swapped.get(leaf, leaf), weight])


@on_names(
    id="unknown-name-skipped", reproduces="PrimeIntellect-ai/prime-rl#2326", caught_by=("ENG001", "ENG004", "LGP002")
)
def unknown_name_skipped(name: str) -> str:
    """The loader does not know the name of a router's weight and goes on without it; one layer."""
    return "" if name == "layers.2.mlp.gate.weight" else name


@on_loaded(
    "model.layers.2.mlp.gate.e_score_correction_bias",
    id="router-bias-held-in-bf16", reproduces="vllm-project/vllm#47777", caught_by=("ENG001", "ENG002"),
    model="tiny:deepseek-v3",
)  # fmt: skip
def router_bias_held_in_bf16(model: Any, tensor: Any) -> Any:
    """The engine holds a router's float32 selection bias in its serving dtype; one layer."""
    return tensor.bfloat16().to(tensor.dtype)


@on_loaded(
    "backbone.layers.4.mixer.D",
    id="mixer-d-dropped", reproduces="PrimeIntellect-ai/prime-rl#2714", caught_by=("ENG001", "ENG002", "LGP002"),
    model="tiny:nemotron-h", fixes=("transformers-47246",),
)  # fmt: skip
def mixer_d_dropped(model: Any, tensor: Any) -> Any:
    """A reload loses the skip weight D of one state-space layer, which keeps its earlier values."""
    return model.model.layers[4].mixer.D.data.clone()


@fault(
    "verifier.engine.engine_hf:HfEngine.load(self, tensors)",
    id="tied-head-cloned", reproduces="PrimeIntellect-ai/prime-rl#2823", caught_by=("ENG001", "ENG002", "LGP002"),
    model="tiny:qwen3-tied", **ROW,
)  # fmt: skip
def tied_head_cloned(original: Any, fire: FireCounter, self: Any, tensors: list[tuple[str, Any]]) -> Any:
    """The engine's tied head is a copy of its own, and an update reaches the embedding alone."""
    if not fire.state:
        import torch

        fire.state["parted"] = True
        head = self.model.lm_head
        head.weight = torch.nn.Parameter(head.weight.data.clone(), requires_grad=False)
        fire.undo(lambda: setattr(head, "weight", self.model.model.embed_tokens.weight))
    fire()
    return original(self, tensors)


@fault(
    "vllm.model_executor.parameter:_ColumnvLLMParameter.load_qkv_weight(self, loaded_weight, kwargs)",
    id="first-shard-on-every-rank", reproduces="vllm-project/vllm-gguf-plugin#103", caught_by=("ENG001", "LGP002"),
    model="tiny:qwen3", engine_tp=2, **VLLM,
)  # fmt: skip
def first_shard_on_every_rank(original: Any, fire: FireCounter, self: Any, loaded_weight: Any, **where: Any) -> None:
    """A loader without its rank takes the first shard of fused query, key and value on every rank."""
    held, self.tp_rank = self.tp_rank, 0
    try:
        original(self, loaded_weight, **where)
    finally:
        self.tp_rank = held
    if held:
        fire()


@fault(
    f"{LORA}.lora_weights:LoRALayerWeights.optimize(self)",
    id="adapter-scale-ignored", reproduces="vllm-project/vllm#55545", **ADAPTER,
)  # fmt: skip
def adapter_scale_ignored(original: Any, fire: FireCounter, self: Any) -> Any:
    """The engine does not take the adapter's scale from its configuration, and applies it with 1."""
    if self.scaling != 1:
        fire()
        self.scaling = 1
    return original(self)


@fault(
    f"{LORA}.worker_manager:WorkerLoRAManager._load_adapter(self, lora_request)",
    id="adapter-of-first-version", reproduces="vllm-project/vllm#42125", **ADAPTER,
)  # fmt: skip
def adapter_of_first_version(original: Any, fire: FireCounter, self: Any, lora_request: Any) -> Any:
    """An adapter under a known name counts as loaded: the second version is the first again."""
    from vllm.lora.request import LoRARequest

    first = fire.state.setdefault("first", lora_request.lora_path)
    if lora_request.lora_path != first:
        fire()
        lora_request = LoRARequest(lora_request.lora_name, lora_request.lora_int_id, first)
    return original(self, lora_request)
