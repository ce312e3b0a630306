"""What takes the place of upstream code in a run, whatever fixes it asks for, in words for the manifest and the report.

A stand-in does what a device or a library would do that the tier does not have; it is always on. A fix changes what
upstream itself does, and is off unless asked for (`upstream_fixes.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def stand_ins_of(model: Mapping[str, Any], run: Mapping[str, Any]) -> list[str]:
    """The stand-ins of a run.

    Args:
        model: the checkpoint's config.json.
        run: its command, tier, and the options of its configuration.
    """
    return [*_trainer(model, run), *_engine(model, run)]


def _trainer(model: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[str]:
    """In the trainer's ranks: platform/cpu*.py, and platform/cuda.py for what both tiers have."""
    if run["tier"] == "cpu":
        yield "Transformer Engine's modules and attention by PyTorch's operations"
        yield "its norm of all gradients by a sum in float64"
        yield "its Adam by torch's, whose steps a resume restores by parameter"
        yield "NCCL by gloo"
        yield "calls to CUDA by the host's answers"
        if model.get("num_experts") or model.get("n_routed_experts"):
            yield "token counts on a device by counts on the host"
        if model.get("mamba_num_heads") is not None:
            yield "mamba-ssm's kernels by a scan in float64"
    yield "torch.compile by eager execution"
    if run["command"] != "golden":
        yield "the process that collects a checkpoint's writers by the rank itself"


def _engine(model: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[str]:
    """In the engine's processes: engine/vllm/worker_vllm.py and model/transformers_hf.py; and in the oracle's."""
    if run.get("engine") == "vllm":
        yield "vLLM's weight-transfer backend by one that confirms every tensor"
        if run["tier"] == "cpu":
            yield "the device that vLLM's CPU worker does not name by the host"
    if run.get("engine") == "hf":
        yield "vLLM by transformers"
        if run["dtype"] != "float32":
            yield "tensors that transformers rounds by the checkpoint's own float32"
    if run.get("engine") and model.get("mamba_num_heads") is not None:
        yield "transformers' state-space scan by one chunk, in the oracle"
