"""Meaning of config.json, and of Megatron's fields in its terms: heads, windows, ropes, scales, experts."""

from __future__ import annotations

import math
import re
from typing import Any

from verifier.config_json import (
    EXPERT_COUNTS,
    Config,
    further_pattern,
    has_delta_nets,
    head_dim,
    hybrid_pattern,
    is_latent,
    rope,
    rotary_dim,
)
from verifier.stages.logprob.records import LAYER_WINDOWS

BIASED = frozenset({"qwen2", "qwen2_moe"})
"""Model types whose queries, keys and values have biases whatever `attention_bias` says."""
OWN_ACTIVATION = frozenset({"gpt_oss"})
"""Model types whose activation is not the one that config.json names."""
FLOAT32_ROUTERS = frozenset(
    {"deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "hy_v3", "nemotron_h"}
)
"""Model types whose routers transformers computes in float32, whatever the model's dtype is."""
GLU_LIMITS = {"gpt_oss": 7.0}
"""Model type -> bound of what the experts' gated units multiply, which transformers has as a constant."""
ACTIVATIONS = {"gelu_pytorch_tanh": "fast_gelu", "relu2": "squared_relu"}
"""Activation of config.json -> Megatron's function, where the names differ."""
ROPE_NAMES = {"deepseek_yarn": "yarn"}
"""vLLM's own names of rope types."""
OTHERS_OF_THE_NAME = frozenset((module, "variance_epsilon") for module in ("q_a_layernorm", "kv_a_layernorm"))
"""Attributes that the name of a key does not decide: transformers gives the norms of latent attention an epsilon of
their own, 1e-6."""
NOT_OF_THE_FORWARD = frozenset({
    "_name_or_path", "architectures", "auto_map", "aux_loss_alpha", "bos_token_id", "chunk_size_feed_forward",
    "dtype", "eos_token_id", "id2label", "initializer_range", "is_encoder_decoder", "label2id", "model_type",
    "num_logits_to_keep", "output_attentions", "output_hidden_states", "output_router_logits", "pad_token_id",
    "pretraining_tp", "problem_type", "rescale_prenorm_residual", "return_dict", "router_aux_loss_coef",
    "torch_dtype", "transformers_version", "use_cache",
})  # fmt: skip
"""Keys that no forward pass of a trainer reads."""


def is_hybrid(config: Config) -> bool:
    """Test for a model with state-space layers."""
    return hybrid_pattern(config) is not None


def hybrid_layers(config: Config) -> Any:
    """Letters of all layers, and behind a slash each those of a step ahead; an ellipsis for other models."""
    own, ahead = hybrid_pattern(config), config.get("num_nextn_predict_layers") or 0
    return ... if own is None else "/".join([own, *[further_pattern(config)] * ahead])


def experts(config: Config) -> int | None:
    """Number of routed experts of a layer; None where no layer has any."""
    found = next((config[key] for key in EXPERT_COUNTS if config.get(key)), None)
    return None if "E" not in (hybrid_pattern(config) or "E") else found


def has_experts(config: Config) -> bool:
    """Test for routed experts."""
    return experts(config) is not None


def attention_bias(config: Config) -> Any:
    """Flag for biases of queries, keys and values."""
    return True if config.get("model_type") in BIASED else config.get("attention_bias", ...)


def trainer_attention_bias(fields: Config) -> bool:
    """Flag for biases of queries, keys and values in the trainer: of these alone, or of all linears."""
    return bool(fields.get("add_qkv_bias") or fields.get("add_bias_linear"))


def activation(config: Config) -> Any:
    """Activation of the feed-forward layers, by Megatron's name."""
    if config.get("model_type") in OWN_ACTIVATION:
        return ...
    if config.get("model_type") == "gemma":  # published with a `hidden_act` that it was not trained with
        config = {"hidden_activation": config.get("hidden_activation") or "gelu_pytorch_tanh"}
    names = ("hidden_activation", "hidden_act", "mlp_hidden_act")
    found: Any = next((config[key] for key in names if config.get(key) is not None), ...)
    return ACTIVATIONS.get(found, found)


def glu_limit(config: Config) -> Any:
    """Bound of what gated units multiply, which a short run may not reach; None for none."""
    return config.get("swiglu_limit") or GLU_LIMITS.get(str(config.get("model_type")))


def router_dtype(config: Config) -> Any:
    """Type that routers compute in, where it is not the model's."""
    return "fp32" if config.get("model_type") in FLOAT32_ROUTERS and has_experts(config) else ...


def trainer_router_dtype(fields: Config) -> Any:
    """Type that the trainer's routers compute in, "fp32" for wider ones: by default the model's."""
    given = fields.get("moe_router_dtype")
    wide = given == "fp64" or (given is None and fields.get("params_dtype") == "torch.float32")
    return "fp32" if wide else given


def window(config: Config) -> int | None:
    """Tokens that a windowed layer sees, itself included; None where no layer has a window that cuts anything."""
    size = config.get("sliding_window")
    kinds = config.get("layer_types")
    switched_off = config.get("use_sliding_window") is False or (kinds and "sliding_attention" not in kinds)
    if not size or switched_off or size >= config.get("max_position_embeddings", size + 1):
        return None
    return int(size)


def layer_windows(config: Config) -> list[int | None] | None:
    """Rows before its own that a row of each layer attends to, None for all; None where kinds of layers are others."""
    kinds = config.get("layer_types") or ["sliding_attention"] * (config.get("num_hidden_layers") or 0)
    if is_hybrid(config) or not {"full_attention", "sliding_attention"}.issuperset(kinds):
        return None
    size = window(config)
    return [size - 1 if size and kind == "sliding_attention" else None for kind in kinds]


def gates_attention(config: Config) -> bool:
    """Test for attention whose linear of queries makes a gate for each head too."""
    return has_delta_nets(config) and config.get("attn_output_gate", True)


def cutting_windows(fields: Config, config: Config) -> Config:
    """Fields of the trainer without windows of all positions, which cut nothing."""
    most = config.get("max_position_embeddings") or math.inf
    size, layers = trainer_window(fields), fields.get(LAYER_WINDOWS, {})
    return {
        **fields, "window_size": None if size is None or size >= most else fields["window_size"],
        LAYER_WINDOWS: {layer: None if rows is None or rows + 1 >= most else rows for layer, rows in layers.items()},
    }  # fmt: skip


def engine_window(config: Config, module: str) -> Any:
    """Window of a layer's module in vLLM, tokens before and after."""
    layers, at = layer_windows(config), re.search(r"\blayers\.(\d+)\.", module)
    if layers is None or at is None or int(at[1]) >= len(layers):
        return ...
    before = layers[int(at[1])]
    if before is None and (config.get("sliding_window") or 0) >= config.get("max_position_embeddings", math.inf):
        return ...  # a window of all positions cuts nothing
    return "[-1, -1]" if before is None else f"[{before}, 0]"


def trainer_window(fields: Config) -> int | None:
    """Tokens that a windowed layer of the trainer sees, itself included: Megatron counts those before it."""
    size = fields.get("window_size")
    return int(size[0]) + 1 if isinstance(size, list) else size


def softmax_scale(config: Config) -> Any:
    """Scale of attention scores where config.json states one; null stands for that of the head's width."""
    if is_latent(config):
        return None
    scalar = config.get("query_pre_attn_scalar")
    scale = config.get("attention_multiplier") if scalar is None else float(scalar) ** -0.5
    return None if scale == head_dim(config) ** -0.5 else scale


def trainer_softmax_scale(fields: Config) -> Any:
    """Scale of attention scores in the trainer; null stands for that of the head's width.

    Source:
        megatron/bridge/models/gemma/gemma2_provider.py: attention of Gemma 2 takes `query_pre_attn_scalar` alone.
    """
    scalar = fields.get("query_pre_attn_scalar")
    scale = float(scalar) ** -0.5 if scalar else fields.get("softmax_scale")
    return None if scale and math.isclose(scale, fields["kv_channels"] ** -0.5, rel_tol=1e-12) else scale  # or 1 / sqrt


def attention_scale(config: Config) -> Any:
    """Scale of attention scores of plain attention."""
    if is_latent(config):
        return ...
    return softmax_scale(config) or head_dim(config) ** -0.5


def rope_theta(config: Config) -> Any:
    """Base of the rotary frequencies."""
    return rope(config).get("rope_theta", ...)


def rotary_share(config: Config) -> Any:
    """Share of a head's width that is rotated, where config.json states it."""
    if config.get("rotary_dim") and not is_latent(config) and rope(config):
        return rotary_dim(config) / head_dim(config)
    return rope(config).get("partial_rotary_factor", ...)


def rope_type(config: Config) -> Any:
    """Kind of the rope's scaling; "none" where layers have no rope."""
    return "none" if is_hybrid(config) else rope(config).get("rope_type", ...)


def trainer_rope_type(fields: Config) -> Any:
    """Kind of the rope's scaling in the trainer: several fields switch one each."""
    kind = fields.get("position_embedding_type")
    if kind not in ("rope", "mrope"):
        return kind
    if fields.get("multi_latent_attention"):
        return "yarn" if fields.get("rope_type") == "yarn" and fields.get("rotary_scaling_factor") != 1 else "default"
    if fields.get("rope_scaling"):
        return "llama3"
    return "linear" if fields.get("seq_len_interpolation_factor") else "default"


def trainer_rope_factor(fields: Config) -> Any:
    """Factor of the rope's scaling in the trainer."""
    kind = trainer_rope_type(fields)
    names = {"llama3": "rope_scaling_factor", "linear": "seq_len_interpolation_factor"}
    latent = "rotary_scaling_factor" if fields.get("multi_latent_attention") else "yarn_rotary_scaling_factor"
    return fields.get(names.get(kind, latent), ...)


def rope_magnitude(config: Config) -> Any:
    """Factor of all sines and cosines of plain attention that YaRN has, unless config.json states another.

    Source:
        transformers/modeling_rope_utils.py `_compute_yarn_parameters`.
    """
    numbers = rope(config)
    if is_latent(config) or numbers.get("rope_type") != "yarn":
        return ...
    if numbers.get("attention_factor") is not None:
        return numbers["attention_factor"]
    growth = 0.1 * math.log(numbers["factor"])
    upper, lower = (numbers.get(key) or 0.0 for key in ("mscale", "mscale_all_dim"))
    if not upper or not lower:
        upper, lower = 1.0, 0.0
    return (growth * upper + 1) / (growth * lower + 1)


def stated_magnitude(config: Config) -> Any:
    """Factor of all sines and cosines that config.json states for YaRN, to six digits; an ellipsis for none."""
    return ... if rope(config).get("attention_factor") is None else round(rope_magnitude(config), 6)


def trainer_magnitude(fields: Config) -> Any:
    """Factor of all sines and cosines that megatron-core takes for YaRN in plain attention, to six digits."""
    numbers = {key: fields.get(f"yarn_{key}") for key in ("mscale", "mscale_all_dim")}
    factor = fields.get("yarn_rotary_scaling_factor")
    if trainer_rope_type(fields) != "yarn" or not factor:
        return ...
    return round(rope_magnitude({"rope_parameters": {"rope_type": "yarn", "factor": factor, **numbers}}), 6)


def rounds_range(config: Config) -> Any:
    """Test for pairs between which YaRN's ramp of plain attention begins and ends, and not parts of pairs."""
    yarn = rope(config).get("rope_type") == "yarn" and not is_latent(config)
    return rope(config).get("truncate", True) if yarn else ...


def original_length(config: Config) -> Any:
    """Length that the rope was made for, before its scaling."""
    return rope(config).get("original_max_position_embeddings", ...)


def trainer_original_length(fields: Config) -> Any:
    """Length that the trainer's rope was made for; megatron-core's constant for Llama 3's."""
    if trainer_rope_type(fields) == "llama3":
        return 8192
    latent = fields.get("multi_latent_attention")
    return fields.get("original_max_position_embeddings" if latent else "yarn_original_max_position_embeddings", ...)


def positions(config: Config) -> Any:
    """Greatest number of positions of an engine's table of angles, where the scaling leaves it as it is."""
    plain = rope(config).get("rope_type") in ("default", "llama3")
    return config.get("max_position_embeddings", ...) if plain else ...


def trainer_normalises(fields: Config) -> bool:
    """True if the trainer's weights of the chosen experts have the sum 1.

    A softmax over the chosen ones has; sigmoid scores of more than one are always divided by their sum.
    """
    return fields.get("moe_router_score_function") != "softmax" or not fields.get("moe_router_pre_softmax")


def shared_width(config: Config) -> Any:
    """Width of all shared experts together."""
    if not has_experts(config):
        return ...
    for key in ("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size"):
        if config.get(key) is not None:
            return config[key] or None
    shared = config.get("n_shared_experts")
    return shared * config["moe_intermediate_size"] if shared else ...


def sparse_layers(config: Config) -> Any:
    """1 for each layer with routed experts, 0 for one without."""
    layers = range(config.get("num_hidden_layers") or 0)
    if not has_experts(config) or is_hybrid(config):
        return ...
    if config.get("first_k_dense_replace") is not None and config.get("moe_layer_freq", 1) == 1:
        return [int(layer >= config["first_k_dense_replace"]) for layer in layers]
    if config.get("decoder_sparse_step") is not None:
        dense = config.get("mlp_only_layers") or []
        return [int(layer not in dense and (layer + 1) % config["decoder_sparse_step"] == 0) for layer in layers]
    return ...


def trainer_sparse_layers(fields: Config) -> Any:
    """1 for each layer of the trainer with routed experts."""
    found = fields.get("moe_layer_freq", ...)
    if not isinstance(found, int):
        return found
    return [int(layer % found == 0) for layer in range(fields["num_layers"])]
