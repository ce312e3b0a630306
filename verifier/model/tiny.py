"""Small generated checkpoints: the same bytes on every machine; no two tensors, rows, heads or experts are alike.

The hidden size is no power of two and every other size is divided by powers of two. So no matrix is square, whole or
cut by tensor parallelism, and a transpose never fits. Only q_proj and o_proj of Qwen2 are square by definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from verifier.data.arithmetic import BOS_ID, EOS_ID, PAD_ID, VOCABULARY, tokenizer_files
from verifier.model.families import JSON
from verifier.model.generated import (
    DECODER,
    DEEPSEEK_V3,
    NEMOTRON_H,
    QWEN3_MOE,
    generate,
    generated_config,
    write_checkpoint,
)  # fmt: skip

PREFIX = "tiny:"

_SIZES: dict[str, JSON] = {
    "vocab_size": 512, "hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4,
    "intermediate_size": 128, "max_position_embeddings": 1024,
}  # fmt: skip
_ROPE = {"rope_theta": 50000.0}
_GQA: dict[str, JSON] = {**_SIZES, **_ROPE, "head_dim": 32}
_EXPERTS = {"moe_intermediate_size": 64, "num_experts_per_tok": 4}
_LATENT: dict[str, JSON] = {
    **DEEPSEEK_V3, **_SIZES, **_ROPE, **_EXPERTS, "num_key_value_heads": 8,
    "q_lora_rank": 72, "kv_lora_rank": 40, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 40,
    "n_routed_experts": 16, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
}  # fmt: skip
_HYBRID: dict[str, JSON] = {
    **NEMOTRON_H, **_SIZES, **_EXPERTS, "head_dim": 32, "num_hidden_layers": 8, "hybrid_override_pattern": "ME*-M-E*",
    "mamba_num_heads": 16, "mamba_head_dim": 8, "n_groups": 8, "ssm_state_size": 8,
    "n_routed_experts": 16, "moe_shared_expert_intermediate_size": 128,
}  # fmt: skip
_LLAMA3_ROPE: dict[str, JSON] = {
    "rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
# Its borders lie within these heads: some pairs are stretched, some are not, and some lie between.
_YARN: dict[str, JSON] = {
    "type": "yarn", "factor": 16.0, "beta_fast": 2.0, "beta_slow": 0.25, "mscale": 1.0, "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
_PLAIN_YARN: dict[str, JSON] = {
    "rope_type": "yarn", "factor": 16.0, "beta_fast": 2.0, "beta_slow": 0.25, "truncate": True,
    "original_max_position_embeddings": 64,
}  # fmt: skip
# A Qwen2 has no key for its heads' size, which is hidden_size / num_attention_heads: q_proj and o_proj are square.
_QWEN2: dict[str, JSON] = {
    **_SIZES,
    **_ROPE,
    "hidden_size": 384,
    "num_attention_heads": 12,
    "use_sliding_window": False,
}
_LLAMA: dict[str, JSON] = {**_GQA, "mlp_bias": False, "max_position_embeddings": 16384, "rope_scaling": _LLAMA3_ROPE}

TINY: dict[str, tuple[str, dict[str, JSON]]] = {
    "qwen3": ("qwen3", {**DECODER, **_GQA}),
    "qwen3-tied": ("qwen3", {**DECODER, **_GQA, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {**DECODER, **_QWEN2}),
    "llama": ("llama", {**DECODER, **_LLAMA}),
    "qwen3-moe": ("qwen3-moe", {**QWEN3_MOE, **_GQA, **_EXPERTS, "num_experts": 16}),
    "qwen3-moe-320": (
        "qwen3-moe",
        {**QWEN3_MOE, **_GQA, **_EXPERTS, "num_hidden_layers": 2, "num_experts": 320, "moe_intermediate_size": 32},
    ),
    "deepseek-v3": ("deepseek-v3", _LATENT),
    "deepseek-v3-yarn": ("deepseek-v3", {**_LATENT, "rope_scaling": _YARN}),
    "nemotron-h": ("nemotron-h", _HYBRID),
}
"""Model id without "tiny:" -> (family, keys of config.json)."""
_ADD: dict[str, JSON] = {
    "vocab_size": len(VOCABULARY), "hidden_size": 112, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 384,
    "max_position_embeddings": 1024, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "bos_token_id": BOS_ID, "eos_token_id": EOS_ID, "pad_token_id": PAD_ID,
}  # fmt: skip
_ADD_EXPERTS: dict[str, JSON] = {
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "tie_word_embeddings": False,
}  # fmt: skip
# megatron-core scores a group by its best num_experts_per_tok / topk_group experts, transformers by its best two.
_ADD_LATENT: dict[str, JSON] = {
    **{key: value for key, value in _ADD.items() if key != "head_dim"},
    "num_key_value_heads": 4, "q_lora_rank": 72, "kv_lora_rank": 24, "qk_nope_head_dim": 32, "qk_rope_head_dim": 16,
    "v_head_dim": 40, "n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1,
    "num_experts_per_tok": 2, "moe_intermediate_size": 64, "tie_word_embeddings": False,
}  # fmt: skip

TO_TRAIN: dict[str, tuple[str, dict[str, JSON]]] = {
    "add": ("qwen3", {**DECODER, **_ADD}),
    "add-moe": ("qwen3-moe", {**QWEN3_MOE, **_ADD, **_ADD_EXPERTS}),  # published mixtures are not tied
    "add-moe-16": ("qwen3-moe", {**QWEN3_MOE, **_ADD, **_ADD_EXPERTS, "num_experts": 16}),
    "add-deepseek": ("deepseek-v3", {**DEEPSEEK_V3, **_ADD_LATENT}),
}
"""Like `TINY`, models that learn a task from their generated weights; each has the character tokenizer.

They are no family of their own, so the round trip's table, noise floors and manifests do not hold them.
"""
PADDED: dict[str, tuple[str, dict[str, JSON]]] = {"qwen3-504": ("qwen3", {**DECODER, **_GQA, "vocab_size": 504})}
"""Like `TINY`, a vocabulary that engines pad to a multiple of 64; no family of its own either."""
STRETCHED: dict[str, tuple[str, dict[str, JSON]]] = {
    "qwen3-yarn": ("qwen3", {**DECODER, **_GQA, "rope_scaling": _PLAIN_YARN})
}
"""Like `TINY`, plain attention with a rope that YaRN stretches; no family of its own either."""
KNOWN = TINY | TO_TRAIN | PADDED | STRETCHED
"""All of them."""
KNOWN_TINY = {PREFIX + item: row for item, row in KNOWN.items()}
"""Full model id -> (family, keys of config.json)."""


def write_tiny(
    name: str,
    directory: Path,
    dtype: str = "float32",
    seed: int = 1,
    *,
    changes: Mapping[str, JSON] | None = None,
) -> Path:
    """Write the tiny checkpoint `name`: a key of `KNOWN`, or an architecture that transformers and Megatron know.

    See `write_checkpoint`, and `write_scaled` for an architecture, which takes no `changes`.
    """
    if name not in KNOWN:
        from verifier.model.architectures_hf import write_scaled

        return write_scaled(name, directory, dtype, seed, others=KNOWN)
    return write_checkpoint(
        PREFIX + name, KNOWN_TINY, directory, dtype=dtype, seed=seed, values=generate, changes=changes,
        texts=tokenizer_files() if name in TO_TRAIN else None,
    )  # fmt: skip


def tiny_config(name: str, dtype: str) -> dict[str, JSON]:
    """Return the config.json that `write_tiny` gives a checkpoint, without writing one."""
    if name not in KNOWN:
        from verifier.model.architectures_hf import scaled_config

        return scaled_config(name, dtype, KNOWN)
    return generated_config(PREFIX + name, KNOWN_TINY, dtype)
