"""Generated checkpoints with the widths of published models and a few of their layers, in bf16.

Every width, head count and size of the vocabulary is that of the published config.json; only layers are left out, and
where it says so, experts. Numbers come from integer hashing in whole tensors, which costs seconds for ten gigabytes.

Source:
    config.json of Qwen/Qwen3-30B-A3B, deepseek-ai/DeepSeek-V3 and nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import TYPE_CHECKING

from verifier.errors import UsageError
from verifier.model.families import JSON, Content, TensorSpec
from verifier.model.generated import generate, write_checkpoint

if TYPE_CHECKING:
    import torch

PREFIX = "wide:"
DTYPE = "bfloat16"
_PIECE = 1 << 22
"""Values that are made at once, so that what lies between hash and number stays in the caches."""

_NO_TOKENS: dict[str, JSON] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}

WIDE: dict[str, tuple[str, dict[str, JSON]]] = {
    # 2 of 48 layers: 3.7 GB.
    "qwen3-30b-a3b": (
        "qwen3-moe",
        {
            **_NO_TOKENS,
            "vocab_size": 151936,
            "hidden_size": 2048,
            "num_hidden_layers": 2,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "router_aux_loss_coef": 0.001,
            "output_router_logits": False,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 1000000.0,
            "rope_scaling": None,
            "max_position_embeddings": 40960,
            "initializer_range": 0.02,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
        },
    ),
    # 1 of 3 dense layers, 1 of 58 with experts, and 64 of its 256 experts, 8 in each of the 8 groups: 11 GB.
    "deepseek-v3": (
        "deepseek-v3",
        {
            **_NO_TOKENS,
            "vocab_size": 129280,
            "hidden_size": 7168,
            "num_hidden_layers": 2,
            "first_k_dense_replace": 1,
            "num_attention_heads": 128,
            "num_key_value_heads": 128,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "intermediate_size": 18432,
            "moe_intermediate_size": 2048,
            "n_routed_experts": 64,
            "n_shared_experts": 1,
            "num_experts_per_tok": 8,
            "n_group": 8,
            "topk_group": 4,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "topk_method": "noaux_tc",
            "moe_layer_freq": 1,
            "num_nextn_predict_layers": 0,
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "rope_scaling": None,
            "max_position_embeddings": 4096,
            "initializer_range": 0.02,
            "attention_bias": False,
            "attention_dropout": 0.0,
            "tie_word_embeddings": False,
            "use_cache": True,
        },
    ),
    # 4 of 52 layers, one of each kind that the model has, and one more state-space layer: 4.3 GB.
    "nemotron-3-nano": (
        "nemotron-h",
        {
            **_NO_TOKENS,
            "vocab_size": 131072,
            "hidden_size": 2688,
            "num_hidden_layers": 4,
            "hybrid_override_pattern": "MEM*",
            "num_attention_heads": 32,
            "num_key_value_heads": 2,
            "head_dim": 128,
            "intermediate_size": 1856,
            "mamba_num_heads": 64,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "ssm_state_size": 128,
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
            "n_routed_experts": 128,
            "n_shared_experts": 1,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1856,
            "moe_shared_expert_intermediate_size": 3712,
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
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
            "use_cache": True,
            "num_logits_to_keep": 1,
        },
    ),
}
"""Model id without its "wide:" -> family row and the sizes in config.json."""


def write_wide(name: str, directory: Path, dtype: str = DTYPE, seed: int = 1) -> Path:
    """Write the wide checkpoint called `name` under `directory`, or find it there.

    Args:
        name: A key of `WIDE`, without "wide:".
        directory: Cache; the checkpoint becomes a subdirectory whose name ends in the key of its contents.
        dtype: "bfloat16", and nothing else.
        seed: Other seeds give other weights.

    Raises:
        UsageError: unknown name, or another dtype.
    """
    if name not in WIDE:
        raise UsageError(f"unknown model `{PREFIX}{name}`: known are {', '.join(PREFIX + known for known in WIDE)}")
    if dtype != DTYPE:
        raise UsageError(f"`{PREFIX}{name}` has the published dtype, so it takes --dtype bf16")
    family, config = WIDE[name]
    return write_checkpoint(f"wide-{name}", family, config, Path(directory), dtype, seed, hashed)


def hashed(spec: TensorSpec, dtype: str, stream: str) -> torch.Tensor:
    """The values of one tensor, as `generated.generate` spreads them, fast for matrices.

    A matrix element is its number, hashed together with the tensor's name in 32-bit integer arithmetic and rounded
    once to float32 and once to bf16, so that it is the same on every machine.

    Args:
        spec: Name, shape and content.
        dtype: "bfloat16".
        stream: Part of the key besides the name.
    """
    if spec.content is not Content.MATRIX:
        return generate(spec, dtype, stream)
    import torch

    digest = hashlib.blake2b(f"{stream}/{spec.name}".encode(), digest_size=8).digest()
    first, second = (int.from_bytes(digest[at : at + 4], "little", signed=True) for at in (0, 4))
    values = torch.empty(math.prod(spec.shape), dtype=getattr(torch, dtype))
    scale = math.sqrt(3.0 / spec.shape[-1]) / 2.0**31
    for begin in range(0, values.numel(), _PIECE):
        piece = values[begin : begin + _PIECE]
        number = torch.arange(begin, begin + piece.numel(), dtype=torch.int32)
        for key, factor in ((first, 0x2C1B3C6D), (second, 0x297A2D39)):
            number.bitwise_xor_(key)
            number.bitwise_xor_(number.bitwise_right_shift(15).bitwise_and_(0x1FFFF))
            number.mul_(factor)
        number.bitwise_xor_(number.bitwise_right_shift(15).bitwise_and_(0x1FFFF))
        piece.copy_(number.to(torch.float32).add_(0.5).mul_(scale))
    return values.view(spec.shape)
