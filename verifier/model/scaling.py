"""Rules that scale the config of any architecture down to a tiny one: sizes, layers, heads, experts, rope, token ids.

A rule looks at keys and values, never at the name of an architecture. Ratios of heads stay, and so does the first
period of every pattern of layers, so a tiny model has each kind of layer that the whole one has.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from verifier.config_json import CHOSEN, EXPERT_COUNTS
from verifier.data.arithmetic import BOS_ID, EOS_ID, PAD_ID
from verifier.model.families import JSON

_LAYERS = 4
_HEAD_DIM = 32
_HEADS = 8
"""Least number of attention heads."""
_EXPERTS, _TOP_K = 16, 4
_POSITIONS = 1024
_WINDOW = 64
"""Tokens; sequences of a round trip are longer."""

_CAP = 2.0
"""Greatest bound of soft-capped logits, which have a deviation of one."""

_SCALE = 1.75
"""Factor of routed experts, where an architecture's own is 1."""

_AT_MOST: dict[str, int] = {
    "vocab_size": 512, "vocab_size_per_layer_input": 512, "hidden_size_per_layer_input": 24,
    "intermediate_size": 128, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
    "moe_shared_expert_intermediate_size": 128, "moe_latent_size": 48, "hash_moe_intermediate_size": 64,
    "q_lora_rank": 72, "kv_lora_rank": 40, "o_lora_rank": 40, "o_groups": 4,
    "qk_nope_head_dim": 32, "v_head_dim": 40, "global_head_dim": 64,
    "index_n_heads": 4, "index_head_dim": 32, "index_topk": 32,
    "sliding_window": _WINDOW, "num_kv_shared_layers": 0, "num_nextn_predict_layers": 0,
    "mamba_num_heads": 16, "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 8,
    "mamba_n_heads": 16, "mamba_d_head": 8, "mamba_d_ssm": 128, "mamba_d_state": 8, "mamba_n_groups": 8,
    "linear_num_key_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
"""Key -> greatest value of a tiny model."""
_TOKENS = {"pad_token_id": PAD_ID, "bos_token_id": BOS_ID, "eos_token_id": EOS_ID}


def scaled(default: Mapping[str, Any]) -> dict[str, JSON]:
    """Return the keys of a config that a tiny model has with another value than `default`, an architecture's own."""
    found: dict[str, JSON] = {
        key: min(value, most) for key, most in _AT_MOST.items() if isinstance(value := default.get(key), int)
    }
    found |= {key: token for key, token in _TOKENS.items() if default.get(key) is not None}
    found |= {
        key: 0.0 for key, value in default.items() if key.endswith("dropout") and isinstance(value, float) and value
    }
    found |= {
        key: min(cap, _CAP) for key, cap in default.items() if key.endswith("logit_softcapping") and cap is not None
    }
    if default.get("mamba_rms_norm") is False and "mamba_norm_before_gate" in default:
        found["mamba_norm_before_gate"] = False  # without that norm it says nothing, and Megatron refuses true
    found |= _layers(default) | _heads(default) | _experts(default) | _multipliers(default)
    return found | _rope({**default, **found}, default)


def _layers(default: Mapping[str, Any]) -> dict[str, JSON]:
    """Shorten the model to the first layers that hold every kind, and all lists of a value per layer with it."""
    layers = default.get("num_hidden_layers")
    if not isinstance(layers, int):
        return {}
    lists = {key: value for key, value in default.items() if isinstance(value, list) and len(value) == layers}
    first = [kinds.index(kind) + 1 for kinds in lists.values() for kind in kinds]
    kept = min(max([_LAYERS, *first]), layers)
    found: dict[str, JSON] = {"num_hidden_layers": kept, **{key: value[:kept] for key, value in lists.items()}}
    for key, most in (("max_window_layers", kept), ("moe_layer_end_index", kept - 1)):
        if isinstance(value := default.get(key), int):
            found[key] = min(value, most)
    if isinstance(dense := default.get("first_k_dense_replace"), int):
        found["first_k_dense_replace"] = min(dense, kept - 1 if "mlp_layer_types" in lists else 1)
    return found


def _heads(default: Mapping[str, Any]) -> dict[str, JSON]:
    """Keep the queries per key-value head; the hidden size follows where the config has no size of a head."""
    heads, hidden = default["num_attention_heads"], default["hidden_size"]
    ratio = heads // (default.get("num_key_value_heads") or heads)
    groups = 1 if ratio == heads and ratio > 1 else 2
    while groups > 1 and groups * ratio < _HEADS:
        groups *= 2
    sized = default.get("head_dim") is not None or "head_dim" in default or hidden % heads > 0
    latent = default.get("kv_lora_rank") is not None
    if not sized and not latent and ratio == 1:
        groups = 12  # with heads of 32 the hidden size is no power of two
    found: dict[str, JSON] = {"num_attention_heads": groups * ratio}
    if "num_key_value_heads" in default:
        found["num_key_value_heads"] = groups  # null stands for as many as heads, which Nemotron's class cannot read
    if default.get("num_global_key_value_heads") is not None:
        found["num_global_key_value_heads"] = min(groups, default["num_global_key_value_heads"])
    found["hidden_size"] = 96 if sized or latent else groups * ratio * _HEAD_DIM
    if isinstance(values := default.get("linear_num_value_heads"), int):
        found["linear_num_value_heads"] = 4 * (values // default["linear_num_key_heads"])
    whole = default.get("head_dim")
    turned = default.get("qk_rope_head_dim")
    if latent:
        found["qk_rope_head_dim"] = 16
        found |= {"head_dim": 16} if whole == turned else {}
        found |= {"qk_head_dim": 48} if "qk_head_dim" in default else {}
    elif sized:
        found["head_dim"] = _HEAD_DIM
        found |= {"qk_rope_head_dim": max(2, _HEAD_DIM * turned // whole)} if whole and turned else {}
    if (scale := default.get("query_pre_attn_scalar")) is not None:
        found["query_pre_attn_scalar"] = _HEAD_DIM if scale == whole else scale
    if isinstance(rotary := default.get("rotary_dim"), int):
        found["rotary_dim"] = max(2, _HEAD_DIM * rotary // (whole or hidden // heads))
    return found


def _experts(default: Mapping[str, Any]) -> dict[str, JSON]:
    """Choose fewer experts than there are, and groups that divide them."""
    found: dict[str, JSON] = {
        key: min(count, _EXPERTS) for key in EXPERT_COUNTS if isinstance(count := default.get(key), int) and count
    }
    if not found:
        return {}
    for key in CHOSEN:
        if key in default:
            found[key] = min(default[key] or _TOP_K, _TOP_K)
    if (default.get("n_group") or 1) > 1:
        found |= {"n_group": 4, "topk_group": 2}
    return found


def _multipliers(default: Mapping[str, Any]) -> dict[str, JSON]:
    """Replace each multiplier of 1, which nobody would miss, by one of its own."""
    found: dict[str, JSON] = {"routed_scaling_factor": _SCALE} if default.get("routed_scaling_factor") == 1.0 else {}
    names = sorted(key for key in default if key.endswith("_multiplier") and default[key] == 1.0)
    found |= {name: 0.75 + place / 16 for place, name in enumerate(names)}
    for name in (key for key in default if key.endswith("_multipliers")):
        ones = default[name]
        found[name] = [0.8 + place / 16 if one == 1.0 else one for place, one in enumerate(ones)]
    return found


def _rope(tiny: Mapping[str, Any], default: Mapping[str, Any]) -> dict[str, JSON]:
    """Fit positions and rotary embeddings: scaling begins within the positions, sections add up to a head."""
    parameters = tiny.get("rope_parameters")
    found: dict[str, Any] = {}
    if isinstance(tiny.get("max_position_embeddings"), int):
        found["max_position_embeddings"] = min(tiny["max_position_embeddings"], _POSITIONS)
    if not isinstance(parameters, Mapping):
        return found
    nested = all(isinstance(item, Mapping) for item in parameters.values())
    shrunk: dict[str, Any] = (
        {key: _one_rope(item, tiny) for key, item in parameters.items()} if nested else _one_rope(parameters, tiny)
    )
    if shrunk != parameters:
        found["rope_parameters"] = shrunk
    original = shrunk.get("original_max_position_embeddings")
    if isinstance(original, int) and "max_position_embeddings" in found:
        found["max_position_embeddings"] = max(_POSITIONS, math.ceil(original * shrunk.get("factor", 1.0)))
    if "initial_context_length" in default and isinstance(original, int):
        found["initial_context_length"] = original
    return found


def _one_rope(rope: Mapping[str, Any], tiny: Mapping[str, Any]) -> dict[str, Any]:
    found = dict(rope)
    if "original_max_position_embeddings" in found:
        found["original_max_position_embeddings"] = min(found["original_max_position_embeddings"], _WINDOW)
    if sections := found.get("mrope_section"):
        pairs = int(tiny["head_dim"] * found.get("partial_rotary_factor", 1.0)) // 2
        parts = [max(1, pairs * part // sum(sections)) for part in sections]
        found["mrope_section"] = [pairs - sum(parts[1:]), *parts[1:]]
    return found
