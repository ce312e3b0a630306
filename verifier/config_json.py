"""Meaning of a config.json, however it is spelled: text model, dtype, quantization, rope, rotated width, epsilons.

Every reader of these keys is here, so that plan, checks, tiers and refusals read a model alike.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

Config = Mapping[str, Any]
"""Keys of config.json, or fields of Megatron's TransformerConfig."""

_BASES = ("rope_theta", "rotary_emb_base")
_SHARES = ("partial_rotary_factor", "rotary_pct", "rotary_emb_fraction")
EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
"""Keys for the number of a layer's routed experts."""
CHOSEN = ("num_experts_per_tok", "top_k_experts", "moe_k", "moe_topk")
"""Keys for the number of experts of each token."""
_EPSILONS = ("rms_norm_eps", "layer_norm_epsilon", "norm_eps", "layer_norm_eps")
_LETTERS = {"mamba": "M", "attention": "*", "mlp": "-", "moe": "E"}
"""Kind of a layer in `layers_block_type` -> its letter in `hybrid_override_pattern`."""


def texts_of(values: Mapping[str, Any]) -> dict[str, str]:
    """JSON of each value."""
    return {key: json.dumps(value, sort_keys=True, default=str) for key, value in values.items()}


def text_model(config: Config) -> Config:
    """Keys of the language model: those of `text_config`, and the outer ones that it does not have."""
    inner = _table(config.get("text_config"))
    return {**{key: config[key] for key in config if key != "text_config"}, **inner} if inner else config


def stated_dtype(config: Config) -> str | None:
    """Dtype that is named, by torch's name without the prefix; None where none is, or "auto".

    Source:
        transformers/configuration_utils.py: `dtype` goes before `torch_dtype`.
    """
    for part in (config, _table(config.get("text_config"))):
        for key in ("dtype", "torch_dtype"):
            found = part.get(key)
            if isinstance(found, str) and found != "auto":
                return found.removeprefix("torch.")
    return None


def quantization(config: Config) -> str | None:
    """Method by which the weights are quantized; None where they are not."""
    model = text_model(config)
    found = model.get("quantization_config") or model.get("compression_config")
    table = {**_table(_table(found).get("quantization")), **_table(found)}
    own = "bitsandbytes" if any(table.get(f"load_in_{bits}bit") for bits in (4, 8)) else "a method without a name"
    return str(table.get("quant_method") or table.get("quant_algo") or own) if found else None


def is_latent(config: Config) -> bool:
    """Test for latent attention (MLA)."""
    return text_model(config).get("kv_lora_rank") is not None


def has_delta_nets(config: Config) -> bool:
    """Test for layers with a gated delta net in the place of attention."""
    return text_model(config).get("linear_num_value_heads") is not None


def keeps_states(config: Config) -> bool:
    """Test for layers that keep a state of the past in the place of keys and values."""
    return has_delta_nets(config) or text_model(config).get("mamba_num_heads") is not None


def hybrid_pattern(config: Config) -> str | None:
    """Letter of each layer of a model with state-space layers; None for other models."""
    kinds = config.get("layers_block_type") or ()
    if config.get("hybrid_override_pattern") is None and {"mamba"} <= {*kinds} <= _LETTERS.keys():
        return _letters(kinds)
    return config.get("hybrid_override_pattern")


def further_pattern(config: Config) -> str:
    """Letter of each layer of a step ahead (MTP) of a model with state-space layers; where none is told "*E"."""
    return config.get("mtp_hybrid_override_pattern") or _letters(config.get("mtp_layers_block_type") or ()) or "*E"


def _letters(kinds: Iterable[str]) -> str:
    return "".join(_LETTERS.get(kind, "?") for kind in kinds)


def head_dim(config: Config) -> Any:
    """Width of a head of plain attention; an ellipsis for latent attention."""
    if is_latent(config):
        return ...
    stated = config.get("head_dim") or config.get("attention_head_dim")  # the latter in Nemotron-H of 2025
    return stated or config["hidden_size"] // config["num_attention_heads"]


def epsilon(config: Config) -> Any:
    """Epsilon of the norms; an ellipsis where no key states it, or several state different ones."""
    found = {config[key] for key in _EPSILONS if config.get(key) is not None}
    return found.pop() if len(found) == 1 else ...


def ropes(config: Config) -> list[dict[str, Any]]:
    """Numbers of the stated ropes, with `rope_type`, and `rope_theta` if stated: one, or one per kind of layer.

    Source:
        transformers/modeling_rope_utils.py `convert_rope_params_to_dict`: `rope_scaling` goes before `rope_parameters`,
        numbers within before those beside it.
    """
    model = text_model(config)
    given = _table(model.get("rope_scaling")) or _table(model.get("rope_parameters"))
    beside = {
        name: found for name, keys in (("rope_theta", _BASES), ("partial_rotary_factor", _SHARES))
        if (found := next((model[key] for key in keys if model.get(key) is not None), None)) is not None
    }  # fmt: skip
    kinds = [item for item in given.values() if isinstance(item, Mapping)] or [given]
    return [_standard({**beside, **item}) for item in kinds if beside or item]


def rope(config: Config) -> dict[str, Any]:
    """Numbers of the rope; empty where none are stated, in models with state-space layers, and for several ropes."""
    found = ropes(config)
    return found[0] if len(found) == 1 and hybrid_pattern(config) is None else {}


def rotary_dim(config: Config) -> Any:
    """Width of the part of a head that is rotated; an ellipsis where no rope is stated."""
    if is_latent(config):
        return config["qk_rope_head_dim"]
    numbers = rope(config)
    if not numbers:
        return ...
    return config.get("rotary_dim") or int(head_dim(config) * numbers.get("partial_rotary_factor", 1))


def with_defaults(config: Config, read: Config) -> dict[str, Any]:
    """Keys of the language model, and for what it does not state, those of config.json as transformers reads it."""
    own, theirs = rope(config), rope(read)
    merged = {"rope_parameters": {**theirs, **own}, "rope_scaling": None} if theirs else {}
    if len(ropes(config)) == 1 < len(ropes(read)):  # Gemma 3 states the scaling of some layers' rope alone
        merged = {"rope_scaling": None}
    return {**text_model(read), **text_model(config), **merged}


def contradiction(config: Config) -> str:
    """Clause on a number of the rope that is stated twice and differently, which libraries read either way; or ""."""
    model, said = text_model(config), dict[str, tuple[str, Any]]()
    for place, name, value in _stated_numbers(model):
        first, other = said.setdefault(name, (place, value))
        if other != value:
            return f"`{first}` = {other!r} and `{place}` = {value!r}, of which libraries read either: make them agree"
    return ""


def _stated_numbers(model: Config) -> Iterator[tuple[str, str, Any]]:
    """Yield (place, name of a number, its value) of each one that is stated, ropes of several kinds apart."""
    names = {**dict.fromkeys(_BASES, "rope_theta"), **dict.fromkeys(_SHARES, "partial_rotary_factor")}
    yield from ((key, name, model[key]) for key, name in names.items() if model.get(key) is not None)
    for table in ("rope_parameters", "rope_scaling"):
        for key, value in _table(model.get(table)).items():
            if key != "type" and value is not None and not isinstance(value, Mapping):
                yield f"{table}.{key}", names.get(key, key), value
    if isinstance(model.get("rotary_dim"), int) and isinstance(model.get("head_dim"), int) and model["head_dim"]:
        yield "rotary_dim / head_dim", "partial_rotary_factor", model["rotary_dim"] / model["head_dim"]


def _standard(numbers: dict[str, Any]) -> dict[str, Any]:
    kind = numbers.pop("type", None)
    found = numbers.get("rope_type") or kind or "default"
    return {**numbers, "rope_type": "default" if found == "mrope" else found}


def _table(value: Any) -> Config:
    return value if isinstance(value, Mapping) else {}
