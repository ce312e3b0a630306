"""Checkpoints of the GPU tests: the tiny ones, and larger ones where kernels take the published sizes only."""

from __future__ import annotations

from verifier.model.tiny import write_tiny
from verifier.runs.model_under_test import cache_folder

LATENT = {
    "hidden_size": 512,
    "q_lora_rank": 192,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
"""vLLM's attention kernels for latents take DeepSeek-V3's own sizes."""

HYBRID = {"hidden_size": 512, "mamba_head_dim": 64, "ssm_state_size": 128}
"""The published sizes of a state-space head and its state, which the kernels are tuned for."""
LARGER = {"deepseek-v3": LATENT, "nemotron-h": HYBRID}


MENDED = ("all",)
"""Fixes that a run of some families asks for, where the test is not about what upstream does."""


def fixes(name: str) -> tuple[str, ...]:
    """Upstream fixes without which a run of this checkpoint does not hold on a GPU."""
    return MENDED if "deepseek" in name or "nemotron" in name else ()


def model(name: str) -> str:
    """What `--model` takes: a tiny checkpoint, a larger one of the same family, or the full name of another."""
    if name in LARGER:
        return str(write_tiny(name, cache_folder(), "bfloat16", changes=LARGER[name]))
    return name if ":" in name else f"tiny:{name}"
