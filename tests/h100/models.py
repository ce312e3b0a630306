"""Checkpoints of the GPU tests: the tiny ones, and one whose latent attention has the published sizes."""

from __future__ import annotations

from verifier.model.tiny import write_family
from verifier.program.workplace import cache_folder

LATENT = {
    "hidden_size": 512,
    "q_lora_rank": 192,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""vLLM's attention kernels for latents take DeepSeek-V3's own sizes."""


def model(name: str) -> str:
    """What `--model` takes: a tiny checkpoint, but for DeepSeek-V3 one with the published latent sizes."""
    if name == "deepseek-v3":
        return str(write_family(name, cache_folder(), LATENT, "bfloat16"))
    return f"tiny:{name}"
