"""Models that Transformer Engine's kernel for rotary embeddings fits.

Without the kernel Megatron embeds a packed micro-batch one sequence at a time, twice a layer: 1,024 sequences of 12
tokens took 5.4 s a step on an H100, 0.4 s with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifier.errors import UsageError

_PLAIN = ("default", "llama3", "linear")
"""Types of rotary embedding that change angles alone, which the kernel is given; YaRN also scales sines and cosines."""


def misfit(model: Mapping[str, Any]) -> str:
    """Reason why the kernel does not fit a model, from its config.json; empty if it fits."""
    if model.get("kv_lora_rank"):
        return "the model has latent attention"
    kind = (model.get("rope_parameters") or model.get("rope_scaling") or {}).get("rope_type", "default")
    return "" if kind in _PLAIN else f"the model has rotary embeddings of type {kind}, which the kernel does not scale"


def require_fit(asked: bool, model: Mapping[str, Any]) -> None:
    """Refuse `megatron.rope_fusion: true` for a model that the kernel does not fit.

    Raises:
        UsageError: names the knob and the reason.
    """
    if asked and (reason := misfit(model)):
        raise UsageError(f"megatron.rope_fusion is true and {reason}: leave it out")
