"""Bugs of the engine's reload: received tensors to what a forward pass reads, in vLLM and in transformers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.fault import Fault, Fired, Inject, Side
from verifier.faults.inject import replaced

WORKER = "vllm.v1.worker.gpu_worker:Worker"
RELOAD = "vllm.model_executor.model_loader.reload.layerwise"
LAYERS = "vllm.model_executor.layers"
QWEN3_MOE_LOAD = "vllm.model_executor.models.qwen3_moe:Qwen3MoeModel.load_weights"
HF_LOAD = "verifier.engine.engine_hf:HfEngine.load"


@contextlib.contextmanager
def _finished_per_chunk(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def update_weights(self: Any, update_info: dict[str, Any]) -> None:
            import torch
            from vllm.model_executor.model_loader import reload

            original(self, update_info)
            model = self.model_runner.model
            with torch.device(self.device):
                reload.finalize_layerwise_reload(model, self.model_config)
                reload.initialize_layerwise_reload(model)
            fired()

        return update_weights

    with replaced(f"{WORKER}.update_weights", "self, update_info", make):
        yield


@contextlib.contextmanager
def _processed(path: str, before: Callable[[Any], None], after: Callable[[Any], None]) -> Iterator[None]:
    """Run `before` with the buffered loads and `after` with the live module whenever a reload processes one module."""
    module: list[Any] = []

    def make_start(original: Any) -> Any:
        def start_weight_update(self: Any, is_checkpoint_format: bool = True) -> None:
            module[:] = [self.model_runner.model.get_submodule(path)]
            original(self, is_checkpoint_format)

        return start_weight_update

    def make_process(original: Any) -> Any:
        def process(layer: Any, info: Any) -> None:
            chosen = bool(module) and layer is module[0]
            if chosen:
                before(info)
            original(layer, info)
            if chosen:
                after(layer)

        return process

    with (
        replaced(f"{WORKER}.start_weight_update", "self, is_checkpoint_format", make_start),
        replaced(f"{RELOAD}:_layerwise_process", "layer, info", make_process),
    ):
        yield


@contextlib.contextmanager
def _load_dropped(fired: Fired) -> Iterator[None]:
    def after(layer: Any) -> None:
        # The fresh allocation holds anything; zeros make the trial repeatable.
        layer.weight.data.zero_()
        fired()

    with _processed("model.layers.1.self_attn.k_norm", lambda info: info.loaded_weights.clear(), after):
        yield


@contextlib.contextmanager
def _processed_again(fired: Fired) -> Iterator[None]:
    def after(layer: Any) -> None:
        layer.weight.data.exp_().neg_()
        fired()

    with _processed("model.layers.2.self_attn.q_norm", lambda info: None, after):
        yield


@contextlib.contextmanager
def _buffer_lost(fired: Fired) -> Iterator[None]:
    clean: dict[str, tuple[Any, Any]] = {}

    def make(original: Any) -> Any:
        def place(layer: Any, info: Any) -> None:
            for name, buffer in info.kernel_tensors[1].items():
                if name == "cos_sin_cache":
                    clean.setdefault(name, (buffer, buffer.data.clone()))
                    buffer.data.zero_()  # what the allocation held
                    fired()
            original(layer, info)

        return place

    with replaced(f"{RELOAD}:_place_kernel_tensors", "layer, info", make):
        try:
            yield
        finally:
            for buffer, contents in clean.values():
                buffer.data.copy_(contents)


@contextlib.contextmanager
def _packed_once(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def dispatch(layer: Any, remove_weight: bool) -> None:
            earlier = layer.__dict__.get("cpu_linear")
            original(layer, remove_weight)
            if earlier is not None and getattr(layer, "prefix", "") == "model.layers.1.self_attn.o_proj":
                layer.cpu_linear = earlier
                fired()

        return dispatch

    with (
        replaced(f"{LAYERS}.utils:dispatch_cpu_unquantized_gemm", "layer, remove_weight", make),
        replaced("verifier.engine.vllm.packed_vllm:dispatch_cpu_unquantized_gemm", "layer, remove_weight", make),
    ):
        yield


def _experts_processed(chosen: Callable[[str], bool], prepare: Callable[[Any], None]) -> Inject:
    """A fault that runs `prepare` on fused experts, with their plain weights in place, before they are packed."""

    @contextlib.contextmanager
    def inject(fired: Fired) -> Iterator[None]:
        def make(original: Any) -> Any:
            def process(self: Any, layer: Any) -> None:
                if chosen(layer.layer_name):
                    prepare(layer)
                    fired()
                original(self, layer)

            return process

        with replaced(
            f"{LAYERS}.fused_moe.unquantized_fused_moe_method:UnquantizedFusedMoEMethod.process_weights_after_loading",
            "self, layer",
            make,
        ):
            yield

    return inject


def _swap_halves(layer: Any) -> None:
    weight = layer.w13_weight.data
    weight.copy_(weight.roll(weight.shape[1] // 2, dims=1))


def _interleave_rows(layer: Any) -> None:
    import torch

    weight = layer.w2_weight.data
    rows = weight.shape[1]
    order = torch.arange(rows).view(2, rows // 2).t().reshape(-1)
    weight.copy_(weight[:, order].clone())


@contextlib.contextmanager
def _initial_placement(fired: Fired) -> Iterator[None]:
    def make(original: Any) -> Any:
        def slot(self: Any, expert_id: int) -> int:
            found = int(original(self, expert_id))
            if self.layer_name == "model.layers.1.mlp.experts" and expert_id in (4, 11):
                fired()
                return int(original(self, 15 - expert_id))
            return found

        return slot

    with replaced(
        f"{LAYERS}.fused_moe.layer:FusedMoE._map_global_expert_id_to_local_expert_id", "self, expert_id", make
    ):
        yield


def _names_changed(change: Callable[[str], str]) -> Inject:
    """A fault in vLLM's mapping of names: each received name as the loader takes it, or nothing to skip it."""

    @contextlib.contextmanager
    def inject(fired: Fired) -> Iterator[None]:
        def make(original: Any) -> Any:
            def load_weights(self: Any, weights: Any) -> Any:
                def mapped() -> Iterator[tuple[str, Any]]:
                    for name, tensor in weights:
                        found = change(name)
                        if found != name:
                            fired()
                        if found:
                            yield found, tensor

                return original(self, mapped())

            return load_weights

        with replaced(QWEN3_MOE_LOAD, "self, weights", make):
            yield

    return inject


def _keys_for_values(name: str) -> str:
    swapped = {"k_proj": "v_proj", "v_proj": "k_proj"}
    *parents, leaf, weight = name.split(".")
    if parents != ["layers", "1", "self_attn"]:
        return name
    return ".".join([*parents, swapped.get(leaf, leaf), weight])


def _one_changed(chosen: str, change: Callable[[Any, Any], Any]) -> Inject:
    """A fault of transformers' engine: it loads one tensor as `change` gives it from the model and what came."""

    def inject(fired: Fired) -> Any:
        def make(original: Any) -> Any:
            def load(self: Any, tensors: list[tuple[str, Any]]) -> list[str]:
                if chosen in (came := dict(tensors)):
                    fired()
                    came[chosen] = change(self.model, came[chosen])
                return original(self, list(came.items()))

            return load

        return replaced(HF_LOAD, "self, tensors", make)

    return inject


@contextlib.contextmanager
def _head_cloned(fired: Fired) -> Iterator[None]:
    parted: list[Any] = []

    def make(original: Any) -> Any:
        def load(self: Any, tensors: list[tuple[str, Any]]) -> list[str]:
            if not parted:
                import torch

                head = self.model.lm_head
                head.weight = torch.nn.Parameter(head.weight.data.clone(), requires_grad=False)
                parted.append(self.model)
            fired()
            return original(self, tensors)

        return load

    with replaced(HF_LOAD, "self, tensors", make):
        try:
            yield
        finally:
            for model in parted:
                model.lm_head.weight = model.model.embed_tokens.weight


FAULTS = (
    Fault(
        id="reload-finished-per-chunk",
        stage=Stage.ENGINE,
        reproduces="NovaSky-AI/SkyRL#1680",
        summary="every chunk is a reload of its own, whose end puts back the layers that are not in the chunk",
        caught_by=("ENG001", "LGP002"),
        inject=_finished_per_chunk,
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="reload-drops-one-load",
        stage=Stage.ENGINE,
        reproduces="PrimeIntellect-ai/prime-rl#2714",
        summary="a reload allocates a parameter anew and loses its load, so it holds what the memory held; one norm",
        caught_by=("ENG001", "LGP002"),
        inject=_load_dropped,
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="processing-applied-again",
        stage=Stage.ENGINE,
        reproduces="vllm-project/vllm#48284",
        summary="a reload transforms one parameter once more, A = -exp(A), as the processing is not idempotent",
        caught_by=("ENG001", "ENG002", "LGP002"),
        inject=_processed_again,
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="runtime-buffer-lost",
        stage=Stage.ENGINE,
        reproduces="vllm-project/vllm#44371",
        summary="a reload copies fresh memory over a buffer that no checkpoint carries; the rotary table",
        caught_by=("ENG002", "LGP002"),
        inject=_buffer_lost,
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="packing-latched",
        stage=Stage.ENGINE,
        reproduces="sgl-project/sglang#30761",
        summary="a flag says that a linear is packed, so later writes leave the packed copy as it was; one linear",
        caught_by=("ENG001", "ENG003", "LGP002"),
        inject=_packed_once,
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="expert-halves-swapped",
        stage=Stage.ENGINE,
        reproduces="vllm-project/vllm#42821",
        summary="a reload writes gate and up in the checkpoint's order, the kernel wants the other; all experts",
        caught_by=("ENG001", "ENG002", "LGP002"),
        inject=_experts_processed(lambda name: True, _swap_halves),
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="same-shape-repack-missed",
        stage=Stage.ENGINE,
        reproduces="verl-project/verl#7986",
        summary="rows stay in another order than the kernel's, as a test of shapes finds nothing to repack; one layer",
        caught_by=("ENG001", "ENG002", "LGP002"),
        inject=_experts_processed(lambda name: name == "model.layers.2.mlp.experts", _interleave_rows),
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="expert-in-initial-slot",
        stage=Stage.ENGINE,
        reproduces="PrimeIntellect-ai/prime-rl#3583",
        summary="a reload puts experts where they were before a load balancer moved them; two experts of one layer",
        caught_by=("ENG001", "ENG002"),
        inject=_initial_placement,
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="fused-shards-exchanged",
        stage=Stage.ENGINE,
        reproduces="vllm-project/vllm#42803",
        summary="rows of one projection go into another's place of the fused qkv weight; keys for values in one layer",
        caught_by=("ENG001", "ENG002", "LGP002"),
        inject=_names_changed(_keys_for_values),
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="unknown-name-skipped",
        stage=Stage.ENGINE,
        reproduces="PrimeIntellect-ai/prime-rl#2326",
        summary="the loader does not know the name of a router's weight and goes on without it; one layer",
        caught_by=("ENG001", "ENG004", "LGP002"),
        inject=_names_changed(lambda name: "" if name == "layers.2.mlp.gate.weight" else name),
        side=Side.ENGINE,
        engine="vllm",
    ),
    Fault(
        id="router-bias-held-in-bf16",
        stage=Stage.ENGINE,
        reproduces="vllm-project/vllm#47777",
        summary="the engine holds a router's float32 selection bias in its serving dtype; one layer",
        caught_by=("ENG001", "ENG002"),
        inject=_one_changed(
            "model.layers.2.mlp.gate.e_score_correction_bias",
            lambda model, tensor: tensor.bfloat16().to(tensor.dtype),
        ),
        side=Side.ENGINE,
        model="tiny:deepseek-v3",
    ),
    Fault(
        id="mixer-d-dropped",
        stage=Stage.ENGINE,
        reproduces="PrimeIntellect-ai/prime-rl#2714",
        summary="a reload loses what came for the skip weight D of one state-space layer, which keeps what it held",
        caught_by=("ENG001", "ENG002", "LGP002"),
        inject=_one_changed("backbone.layers.4.mixer.D", lambda model, _: model.model.layers[4].mixer.D.data.clone()),
        side=Side.ENGINE,
        model="tiny:nemotron-h",
        fixes=("transformers-47246",),
    ),
    Fault(
        id="tied-head-cloned",
        stage=Stage.ENGINE,
        reproduces="PrimeIntellect-ai/prime-rl#2823",
        summary="the engine's tied head is a copy of its own, and an update reaches the embedding alone",
        caught_by=("ENG001", "ENG002", "LGP002"),
        inject=_head_cloned,
        side=Side.ENGINE,
        model="tiny:qwen3-tied",
    ),
)
