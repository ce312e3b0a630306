"""Models that Transformer Engine's kernel for rotary embeddings fits.

Without the kernel Megatron embeds a packed micro-batch one sequence at a time, twice a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PLAIN = ("default", "linear", "llama3")
"""Types of rotary embedding that change angles alone, which the kernel is given; YaRN also scales sines and cosines."""


def misfit(model: Mapping[str, Any]) -> str:
    """Reason why the kernel does not fit a model, from its config.json; empty if it fits."""
    if model.get("kv_lora_rank"):
        return "latent attention"
    rope = model.get("rope_parameters") or model.get("rope_scaling") or {}
    for item in (rope, *(each for each in rope.values() if isinstance(each, Mapping))):  # one for each kind of layer
        kind = item.get("rope_type", item.get("type", "default"))
        if kind not in _PLAIN:
            return f"rotary embeddings of type {kind}"
        if "mrope_section" in item:
            return "rotary embeddings of several axes"
    return ""
