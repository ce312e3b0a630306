"""Small generated checkpoints: the same bytes on every machine, and no two tensors, rows, heads or experts alike.

The hidden size is no power of two while every other size is split in powers of two, so no matrix is square, whole or
cut by tensor parallelism, and a transpose never fits; a Qwen2's q_proj and o_proj alone are square by definition.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from verifier.errors import UsageError
from verifier.model.families import JSON
from verifier.model.generated import generate, write_checkpoint

PREFIX = "tiny:"

_BASE: dict[str, JSON] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 128,
    "hidden_act": "silu",
    "max_position_embeddings": 1024,
    "initializer_range": 0.02,
    "rms_norm_eps": 1e-6,
    "rope_theta": 50000.0,
    "rope_scaling": None,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "tie_word_embeddings": False,
    "use_cache": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_GQA = {"head_dim": 32}
_MOE = {"moe_intermediate_size": 64, "norm_topk_prob": True, "num_experts_per_tok": 4}

_LATENT: dict[str, JSON] = {
    **_BASE,
    **_MOE,
    "num_key_value_heads": 8,
    "q_lora_rank": 72,
    "kv_lora_rank": 40,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "num_nextn_predict_layers": 0,
}

_HYBRID: dict[str, JSON] = {
    "vocab_size": 512,
    "hidden_size": 96,
    "num_hidden_layers": 8,
    "hybrid_override_pattern": "ME*-M-E*",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 128,
    "mamba_num_heads": 16,
    "mamba_head_dim": 8,
    "n_groups": 8,
    "ssm_state_size": 8,
    "conv_kernel": 4,
    "expand": 2,
    "chunk_size": 128,
    "use_conv_bias": True,
    "mamba_hidden_act": "silu",
    "mamba_proj_bias": False,
    "mamba_ssm_cache_dtype": "float32",
    "use_mamba_kernels": False,
    "time_step_floor": 1e-4,
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 128,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "mlp_hidden_act": "relu2",
    "mlp_bias": False,
    "use_bias": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "layer_norm_epsilon": 1e-5,
    "residual_in_fp32": False,
    "rescale_prenorm_residual": True,
    "initializer_range": 0.02,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "use_cache": True,
    "num_logits_to_keep": 1,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}

TINY: dict[str, tuple[str, dict[str, JSON]]] = {
    "qwen3": ("qwen3", {**_BASE, **_GQA}),
    "qwen3-tied": ("qwen3", {**_BASE, **_GQA, "tie_word_embeddings": True}),
    # A Qwen2 says nothing of its heads' size: it is hidden_size / num_attention_heads, so q_proj and o_proj are square.
    "qwen2": ("qwen2", {**_BASE, "hidden_size": 384, "num_attention_heads": 12, "use_sliding_window": False}),
    "llama": (
        "llama",
        {
            **_BASE,
            **_GQA,
            "mlp_bias": False,
            "max_position_embeddings": 16384,
            "rope_scaling": {
                "rope_type": "llama3",
                "factor": 32.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192,
            },
        },
    ),
    "qwen3-moe": (
        "qwen3-moe",
        {
            **_BASE,
            **_GQA,
            **_MOE,
            "num_experts": 16,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
        },
    ),
    "deepseek-v3": ("deepseek-v3", _LATENT),
    "deepseek-v3-yarn": (
        "deepseek-v3",
        {
            **_LATENT,
            "rope_scaling": {
                "type": "yarn",
                "factor": 16.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "nemotron-h": ("nemotron-h", _HYBRID),
}
"""Model id without its "tiny:" -> family row and the sizes in config.json."""


def write_tiny(name: str, directory: Path, dtype: str = "float32", seed: int = 1) -> Path:
    """Write the tiny checkpoint called `name` under `directory`, or find it there.

    Args:
        name: A key of `TINY`, without "tiny:".
        directory: Cache; the checkpoint becomes a subdirectory whose name ends in the key of its contents.
        dtype: "float32" or "bfloat16"; what families keep in float32 stays float32.
        seed: Other seeds give other weights.

    Returns:
        Path of the checkpoint directory.

    Raises:
        UsageError: unknown name or dtype.
    """
    if name not in TINY:
        raise UsageError(f"unknown model `{PREFIX}{name}`: known are {', '.join(PREFIX + known for known in TINY)}")
    family, config = TINY[name]
    return write_checkpoint(name, family, config, Path(directory), dtype, seed, generate)


def write_family(
    family: str, directory: Path, config_overrides: Mapping[str, JSON], dtype: str = "float32", seed: int = 1
) -> Path:
    """Write a checkpoint of any size: the tiny one of the same name with other sizes in its config.json.

    Args:
        family: A key of `TINY`.
        directory: As for `write_tiny`.
        config_overrides: Config key -> value, for example ``{"hidden_size": 1024}``.
        dtype: As for `write_tiny`.
        seed: As for `write_tiny`.

    Raises:
        UsageError: unknown family or dtype, or a config that leaves the family's row.
    """
    if family not in TINY:
        raise UsageError(f"unknown family `{family}`: known are {', '.join(TINY)}")
    row, config = TINY[family]
    sizes = {**config, **config_overrides}
    return write_checkpoint(f"{family}-custom", row, sizes, Path(directory), dtype, seed, generate)
