"""Models that Transformer Engine's kernel for rotary embeddings fits.

Without the kernel Megatron embeds a packed micro-batch one sequence at a time, twice a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from verifier.config_json import is_latent, ropes

_PLAIN = ("default", "linear", "llama3")
"""Types of rotary embedding that change angles alone, which the kernel is given; YaRN also scales sines and cosines."""


def misfit(model: Mapping[str, Any]) -> str:
    """Reason why the kernel does not fit a model, from its config.json; empty if it fits."""
    if is_latent(model):
        return "latent attention"
    for rope in ropes(model):
        if rope["rope_type"] not in _PLAIN:
            return f"rotary embeddings of type {rope['rope_type']}"
        if "mrope_section" in rope:
            return "rotary embeddings of several axes"
    return ""
