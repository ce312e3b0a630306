"""Stand-ins for upstream code in a run, whatever fixes it asks for, in words for the manifest and the report.

A stand-in does what a device or a library would do that the tier does not have; it is always on. A fix changes what
upstream itself does, and is off unless asked for (`upstream_fixes.py`).
"""

from __future__ import annotations

from collections.abc import Iterator

from verifier.config_json import EXPERT_COUNTS, has_delta_nets, text_model
from verifier.errors import UsageError
from verifier.platform.upstream_fixes import RunFacts, Sizes


def require_stand_ins(model: Sizes) -> None:
    """Refuse a model, by its config.json, with layers that the CPU tier cannot compute."""
    if topk := text_model(model).get("index_topk"):
        raise UsageError(
            "the CPU tier has no stand-in for sparse latent attention by an indexer "
            f"(`index_topk` = {topk} in config.json): use a GPU"
        )


def stand_ins_of(model: Sizes, run: RunFacts) -> Iterator[str]:
    """Yield the stand-ins of a run, each as "this for that".

    In the trainer's ranks: platform/cpu*.py, train/optimizer_megatron.py, and for both tiers platform/cuda.py and
    train/router_order_megatron.py. In the engine's processes: engine/vllm/worker_vllm.py, platform/__init__.py, and
    model/transformers_hf.py, which is also the oracle's.
    """
    hybrid = model.get("mamba_num_heads") is not None
    experts = any(model.get(size) for size in EXPERT_COUNTS)
    if run.tier == "cpu":
        yield "PyTorch modules and functions for Transformer Engine's"
        yield "a float64 sum for its gradient norm"
        yield "torch's Adam for its own"
        yield "gloo for NCCL"
        yield "the host for CUDA calls"
        if hybrid:
            yield "a float64 scan for mamba-ssm"
        if has_delta_nets(model):
            yield "a float64 gated delta rule for flash-linear-attention's"
        if model.get("model_type") == "gemma2":
            yield "attention to packed sequences for Gemma 2's, which takes none"
    if run.training and experts:
        yield "the order of a token's experts in training for that of passes without gradients"
    yield "eager execution for torch.compile"
    if run.steps > 1:
        yield "the rank for the process that collects checkpoint writers"
    if run.engine == "vllm":
        yield "a confirmed weight transfer for vLLM's"
        if run.tier == "cuda":
            yield "vLLM's other kernels for FlashInfer's"
        if run.tier == "cpu":
            yield "the host for the device that vLLM's CPU worker lacks"
            if run.adapter_tp > 1:
                yield "the rank's own product with an adapter's A for a gather of the ranks' (vllm #45691)"
            if experts:
                yield "a function for the activation module that vLLM's CPU experts make in each pass (vllm #45447)"
                if run.engine_ep > 1:
                    yield "a choice of the rank's own experts for that of all by vLLM's CPU kernels (vllm #57837)"
                if run.routes:
                    yield "a record of the CPU experts' choice for vLLM's capture of routes by CUDA streams"
    if run.engine == "hf":
        yield "transformers for vLLM"
        if run.dtype != "float32":
            yield "the checkpoint's float32 tensors for transformers' rounded ones"
    if run.engine and has_delta_nets(model):
        yield "the gated delta rule token by token for transformers' chunks, in the oracle"
    if run.engine and hybrid:
        yield "one chunk for transformers' chunked state-space scan, in the oracle"
