"""Supported model families: one declarative row each, nothing dispatched on substrings.

A row says which tensors a checkpoint of the family holds, under the spelling of the published checkpoints, and
what shape each has in terms of the sizes in ``config.json``. Where the tensors live in Megatron is stated, just as
declaratively and independently of Megatron-Bridge, in ``verifier/export/names.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from verifier.errors import UsageError

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]


class Scope(Enum):
    """Over which indices a tensor pattern is repeated."""

    MODEL = "once"
    LAYER = "every layer"
    DENSE = "every layer with a dense MLP"
    MOE = "every layer with routed experts"
    EXPERT = "every routed expert of every such layer"


class Content(Enum):
    """What a tensor is, as far as generated values care."""

    MATRIX = "matrix"
    """Mean 0, standard deviation 1/sqrt(last dim)."""
    NORM = "norm"
    """Scale of a norm: near 1 and never 1."""
    SCORE_BIAS = "score bias"
    """Additive bias of router scores: never 0; float32 in every checkpoint, as published."""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor pattern of a checkpoint, for example every layer's ``q_proj``."""

    pattern: str
    """Checkpoint spelling, with ``{layer}`` and ``{expert}`` where they apply."""
    dims: tuple[str, ...]
    """Names of sizes (see `sizes_of`), one per dim."""
    scope: Scope = Scope.LAYER
    content: Content = Content.MATRIX


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the table: an architecture, its tensors, and the settings under which the row is true."""

    name: str
    architecture: str
    """``architectures[0]`` in config.json."""
    model_type: str
    tensors: tuple[TensorRow, ...]
    requires: Mapping[str, tuple[JSON, ...]] = field(default_factory=dict)
    """Config key -> values under which this row describes the checkpoint. An absent key counts as None."""
    needs: tuple[str, ...] = ()
    """Config keys that must not be None for this row to describe the checkpoint."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One concrete tensor of one checkpoint."""

    name: str
    shape: tuple[int, ...]
    content: Content


_EMBEDDING = TensorRow("model.embed_tokens.weight", ("vocab", "hidden"), Scope.MODEL)
_FINAL_NORM = TensorRow("model.norm.weight", ("hidden",), Scope.MODEL, Content.NORM)
_LM_HEAD = TensorRow("lm_head.weight", ("vocab", "hidden"), Scope.MODEL)
_LAYER_NORMS = (
    TensorRow("model.layers.{layer}.input_layernorm.weight", ("hidden",), content=Content.NORM),
    TensorRow("model.layers.{layer}.post_attention_layernorm.weight", ("hidden",), content=Content.NORM),
)
_FRAME = (_EMBEDDING, *_LAYER_NORMS, _FINAL_NORM, _LM_HEAD)

_GQA = (
    TensorRow("model.layers.{layer}.self_attn.q_proj.weight", ("q", "hidden")),
    TensorRow("model.layers.{layer}.self_attn.k_proj.weight", ("kv", "hidden")),
    TensorRow("model.layers.{layer}.self_attn.v_proj.weight", ("kv", "hidden")),
    TensorRow("model.layers.{layer}.self_attn.o_proj.weight", ("hidden", "q")),
)
_QK_NORM = (
    TensorRow("model.layers.{layer}.self_attn.q_norm.weight", ("head_dim",), content=Content.NORM),
    TensorRow("model.layers.{layer}.self_attn.k_norm.weight", ("head_dim",), content=Content.NORM),
)
_MLA = (
    TensorRow("model.layers.{layer}.self_attn.q_a_proj.weight", ("q_lora", "hidden")),
    TensorRow("model.layers.{layer}.self_attn.q_a_layernorm.weight", ("q_lora",), content=Content.NORM),
    TensorRow("model.layers.{layer}.self_attn.q_b_proj.weight", ("mla_q", "q_lora")),
    TensorRow("model.layers.{layer}.self_attn.kv_a_proj_with_mqa.weight", ("mla_kv_down", "hidden")),
    TensorRow("model.layers.{layer}.self_attn.kv_a_layernorm.weight", ("kv_lora",), content=Content.NORM),
    TensorRow("model.layers.{layer}.self_attn.kv_b_proj.weight", ("mla_kv_up", "kv_lora")),
    TensorRow("model.layers.{layer}.self_attn.o_proj.weight", ("hidden", "mla_out")),
)
_DENSE_MLP = (
    TensorRow("model.layers.{layer}.mlp.gate_proj.weight", ("ffn", "hidden"), Scope.DENSE),
    TensorRow("model.layers.{layer}.mlp.up_proj.weight", ("ffn", "hidden"), Scope.DENSE),
    TensorRow("model.layers.{layer}.mlp.down_proj.weight", ("hidden", "ffn"), Scope.DENSE),
)
_EXPERTS = (
    TensorRow("model.layers.{layer}.mlp.gate.weight", ("experts", "hidden"), Scope.MOE),
    TensorRow("model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight", ("moe_ffn", "hidden"), Scope.EXPERT),
    TensorRow("model.layers.{layer}.mlp.experts.{expert}.up_proj.weight", ("moe_ffn", "hidden"), Scope.EXPERT),
    TensorRow("model.layers.{layer}.mlp.experts.{expert}.down_proj.weight", ("hidden", "moe_ffn"), Scope.EXPERT),
)
_SCORE_BIAS = TensorRow(
    "model.layers.{layer}.mlp.gate.e_score_correction_bias", ("experts",), Scope.MOE, Content.SCORE_BIAS
)
_SHARED_EXPERTS = (
    TensorRow("model.layers.{layer}.mlp.shared_experts.gate_proj.weight", ("shared_ffn", "hidden"), Scope.MOE),
    TensorRow("model.layers.{layer}.mlp.shared_experts.up_proj.weight", ("shared_ffn", "hidden"), Scope.MOE),
    TensorRow("model.layers.{layer}.mlp.shared_experts.down_proj.weight", ("hidden", "shared_ffn"), Scope.MOE),
)

_NO_BIAS = {"attention_bias": (False, None), "mlp_bias": (False, None), "quantization_config": (None,)}

_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts")

FAMILIES: dict[str, Family] = {
    row.name: row
    for row in (
        Family(
            name="qwen3",
            architecture="Qwen3ForCausalLM",
            model_type="qwen3",
            tensors=(*_FRAME, *_GQA, *_QK_NORM, *_DENSE_MLP),
            requires=_NO_BIAS,
        ),
        Family(
            name="llama",
            architecture="LlamaForCausalLM",
            model_type="llama",
            tensors=(*_FRAME, *_GQA, *_DENSE_MLP),
            requires=_NO_BIAS,
        ),
        Family(
            name="qwen3-moe",
            architecture="Qwen3MoeForCausalLM",
            model_type="qwen3_moe",
            tensors=(*_FRAME, *_GQA, *_QK_NORM, *_EXPERTS),
            requires={**_NO_BIAS, "decoder_sparse_step": (1, None), "mlp_only_layers": ([], None)},
        ),
        Family(
            name="deepseek-v3",
            architecture="DeepseekV3ForCausalLM",
            model_type="deepseek_v3",
            tensors=(*_FRAME, *_MLA, *_DENSE_MLP, *_EXPERTS, _SCORE_BIAS, *_SHARED_EXPERTS),
            requires={**_NO_BIAS, "num_nextn_predict_layers": (0, None), "moe_layer_freq": (1, None)},
            needs=("q_lora_rank", "n_shared_experts"),
        ),
    )
}


def family_of(config: Mapping[str, JSON]) -> Family | None:
    """The row that describes checkpoints with this config.json, or None if no row does.

    Args:
        config: Parsed config.json.
    """
    architectures = config.get("architectures")
    for row in FAMILIES.values():
        if isinstance(architectures, list) and architectures[:1] == [row.architecture]:
            holds = all(config.get(key) in allowed for key, allowed in row.requires.items())
            complete = all(config.get(key) is not None for key in row.needs)
            return row if holds and complete else None
    return None


def num_experts_of(config: Mapping[str, Any]) -> int:
    """Routed experts of each layer that has any, however the family spells it; 0 for a dense model."""
    return int(next((config[key] for key in _EXPERT_COUNTS if config.get(key)), 0))


def sizes_of(config: Mapping[str, JSON]) -> dict[str, int]:
    """Named sizes that tensor rows and Megatron placements refer to, in elements.

    Args:
        config: Parsed config.json of a checkpoint that has a family row.

    Returns:
        Size by name. Sizes that do not apply to the family are absent. ``first_moe`` is the index of the first
        layer with routed experts (``layers`` if the model has none).
    """
    heads = _size(config, "num_attention_heads")
    kv_heads = _size(config, "num_key_value_heads", heads)
    layers = _size(config, "num_hidden_layers")
    sizes = {
        "vocab": _size(config, "vocab_size"),
        "hidden": _size(config, "hidden_size"),
        "layers": layers,
        "heads": heads,
        "kv_heads": kv_heads,
        "ffn": _size(config, "intermediate_size"),
        "first_moe": layers,
    }
    if config.get("kv_lora_rank") is not None:
        nope, rope = _size(config, "qk_nope_head_dim"), _size(config, "qk_rope_head_dim")
        value = _size(config, "v_head_dim")
        sizes |= {
            "q_lora": _size(config, "q_lora_rank"),
            "kv_lora": _size(config, "kv_lora_rank"),
            "mla_q": heads * (nope + rope),
            "mla_kv_down": _size(config, "kv_lora_rank") + rope,
            "mla_kv_up": heads * (nope + value),
            "mla_out": heads * value,
        }
    else:
        head_dim = _size(config, "head_dim", sizes["hidden"] // heads)
        sizes |= {"head_dim": head_dim, "q": heads * head_dim, "kv": kv_heads * head_dim}
    experts = _size(config, "num_experts", _size(config, "n_routed_experts", 0))
    if experts:
        sizes |= {
            "experts": experts,
            "moe_ffn": _size(config, "moe_intermediate_size"),
            "shared_ffn": _size(config, "moe_intermediate_size") * _size(config, "n_shared_experts", 0),
            "first_moe": _size(config, "first_k_dense_replace", 0),
        }
    return sizes


def _size(config: Mapping[str, JSON], key: str, default: int | None = None) -> int:
    """One size, or `default` where the key is absent or null; 0 is a size only where it is the default."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    least = 0 if default == 0 else 1
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"config.json has `{key}` = {value!r} where a positive integer is needed")
    return value


def tensors_of(family: Family, config: Mapping[str, JSON]) -> Iterator[TensorSpec]:
    """Every tensor that a checkpoint of this family and config holds, in the order of the model's layers.

    With tied embeddings the checkpoint holds no ``lm_head.weight``, as published checkpoints do not.
    """
    sizes = sizes_of(config)
    tied = bool(config.get("tie_word_embeddings"))
    yield from _expand(_EMBEDDING, sizes, None)
    for layer in range(sizes["layers"]):
        dense = layer < sizes["first_moe"]
        scopes = (Scope.LAYER, Scope.DENSE) if dense else (Scope.LAYER, Scope.MOE, Scope.EXPERT)
        for row in family.tensors:
            if row.scope in scopes:
                yield from _expand(row, sizes, layer)
    yield from _expand(_FINAL_NORM, sizes, None)
    if not tied:
        yield from _expand(_LM_HEAD, sizes, None)


def _expand(row: TensorRow, sizes: Mapping[str, int], layer: int | None) -> Iterator[TensorSpec]:
    shape = tuple(sizes[dim] for dim in row.dims)
    for expert in range(sizes["experts"]) if row.scope is Scope.EXPERT else (None,):
        name = row.pattern.format(layer=layer, expert=expert)
        yield TensorSpec(name=name, shape=shape, content=row.content)
