"""Supported model families: one declarative row each.

A row lists the tensors of the family's checkpoints under their published names, with shapes in terms of the sizes in
``config.json``. `verifier/export/names.py` lists their places in Megatron, independently of Megatron-Bridge.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from verifier.errors import UsageError

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]


class Scope(Enum):
    """Indices over which a tensor pattern is repeated."""

    MODEL = "once"
    LAYER = "every layer"
    ATTENTION = "every attention layer of a hybrid"
    MAMBA = "every state-space layer of a hybrid"
    DENSE = "every layer with a dense MLP"
    MOE = "every layer with routed experts"
    EXPERT = "every routed expert of every such layer"


class Content(Enum):
    """Kind of a tensor; decides how its values are generated."""

    MATRIX = "matrix"
    """Mean 0, standard deviation 1/sqrt(last dim)."""
    NORM = "norm"
    """Scale of a norm; near 1 and never 1."""
    SCORE_BIAS = "score bias"
    """Additive bias of router scores; never 0, and float32 in every checkpoint, as published."""
    BIAS = "bias"
    """Bias of a linear or convolution; never 0."""
    DECAY = "decay"
    """Logarithm of a state's decay rate; states fade within 2 to 20 tokens. Float32, as published for Nemotron 3."""


@dataclass(frozen=True, slots=True)
class TensorRow:
    """One tensor pattern of a checkpoint, such as every layer's ``q_proj``."""

    pattern: str
    """Checkpoint name, with ``{layer}`` and ``{expert}`` where they apply."""
    dims: tuple[str, ...]
    """Name of the size (see `sizes_of`) of each dim."""
    scope: Scope = Scope.LAYER
    content: Content = Content.MATRIX


_EMBEDDING = TensorRow("model.embed_tokens.weight", ("vocab", "hidden"), Scope.MODEL)
_FINAL_NORM = TensorRow("model.norm.weight", ("hidden",), Scope.MODEL, Content.NORM)
_LM_HEAD = TensorRow("lm_head.weight", ("vocab", "hidden"), Scope.MODEL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One row of the table: an architecture, its tensors, and the settings that the row requires."""

    name: str
    architecture: str
    """``architectures[0]`` in config.json."""
    model_type: str
    """``model_type`` in config.json."""
    tensors: tuple[TensorRow, ...]
    embedding: TensorRow = _EMBEDDING
    final_norm: TensorRow = _FINAL_NORM
    requires: Mapping[str, tuple[JSON, ...]] = field(default_factory=dict)
    """Key of config.json -> values under which this row describes the checkpoint; an absent key counts as None."""
    needs: tuple[str, ...] = ()
    """Keys of config.json that must not be None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One concrete tensor of one checkpoint."""

    name: str
    shape: tuple[int, ...]
    content: Content


def _layer(leaf: str, *dims: str, scope: Scope = Scope.LAYER, content: Content = Content.MATRIX) -> TensorRow:
    return TensorRow(f"model.layers.{{layer}}.{leaf}", dims, scope, content)


_LAYER_NORMS = (
    _layer("input_layernorm.weight", "hidden", content=Content.NORM),
    _layer("post_attention_layernorm.weight", "hidden", content=Content.NORM),
)
_FRAME = (_EMBEDDING, *_LAYER_NORMS, _FINAL_NORM, _LM_HEAD)

_GQA = (
    _layer("self_attn.q_proj.weight", "q", "hidden"),
    _layer("self_attn.k_proj.weight", "kv", "hidden"),
    _layer("self_attn.v_proj.weight", "kv", "hidden"),
    _layer("self_attn.o_proj.weight", "hidden", "q"),
)
_QKV_BIAS = (
    _layer("self_attn.q_proj.bias", "q", content=Content.BIAS),
    _layer("self_attn.k_proj.bias", "kv", content=Content.BIAS),
    _layer("self_attn.v_proj.bias", "kv", content=Content.BIAS),
)
_QK_NORM = (
    _layer("self_attn.q_norm.weight", "head_dim", content=Content.NORM),
    _layer("self_attn.k_norm.weight", "head_dim", content=Content.NORM),
)
_MLA = (
    _layer("self_attn.q_a_proj.weight", "q_lora", "hidden"),
    _layer("self_attn.q_a_layernorm.weight", "q_lora", content=Content.NORM),
    _layer("self_attn.q_b_proj.weight", "mla_q", "q_lora"),
    _layer("self_attn.kv_a_proj_with_mqa.weight", "mla_kv_down", "hidden"),
    _layer("self_attn.kv_a_layernorm.weight", "kv_lora", content=Content.NORM),
    _layer("self_attn.kv_b_proj.weight", "mla_kv_up", "kv_lora"),
    _layer("self_attn.o_proj.weight", "hidden", "mla_out"),
)
_DENSE_MLP = (
    _layer("mlp.gate_proj.weight", "ffn", "hidden", scope=Scope.DENSE),
    _layer("mlp.up_proj.weight", "ffn", "hidden", scope=Scope.DENSE),
    _layer("mlp.down_proj.weight", "hidden", "ffn", scope=Scope.DENSE),
)
_EXPERTS = (
    _layer("mlp.gate.weight", "experts", "hidden", scope=Scope.MOE),
    _layer("mlp.experts.{expert}.gate_proj.weight", "moe_ffn", "hidden", scope=Scope.EXPERT),
    _layer("mlp.experts.{expert}.up_proj.weight", "moe_ffn", "hidden", scope=Scope.EXPERT),
    _layer("mlp.experts.{expert}.down_proj.weight", "hidden", "moe_ffn", scope=Scope.EXPERT),
)
_SCORE_BIAS = _layer("mlp.gate.e_score_correction_bias", "experts", scope=Scope.MOE, content=Content.SCORE_BIAS)
_SHARED_EXPERTS = (
    _layer("mlp.shared_experts.gate_proj.weight", "shared_ffn", "hidden", scope=Scope.MOE),
    _layer("mlp.shared_experts.up_proj.weight", "shared_ffn", "hidden", scope=Scope.MOE),
    _layer("mlp.shared_experts.down_proj.weight", "hidden", "shared_ffn", scope=Scope.MOE),
)

_HYBRID_EMBEDDING = TensorRow("backbone.embeddings.weight", ("vocab", "hidden"), Scope.MODEL)
_HYBRID_FINAL_NORM = TensorRow("backbone.norm_f.weight", ("hidden",), Scope.MODEL, Content.NORM)


def _mixer(leaf: str, dims: tuple[str, ...], scope: Scope, content: Content = Content.MATRIX) -> TensorRow:
    return TensorRow(f"backbone.layers.{{layer}}.mixer.{leaf}", dims, scope, content)


_HYBRID = (
    _HYBRID_EMBEDDING,
    TensorRow("backbone.layers.{layer}.norm.weight", ("hidden",), content=Content.NORM),
    _mixer("in_proj.weight", ("mamba_in", "hidden"), Scope.MAMBA),
    _mixer("conv1d.weight", ("mamba_conv", "one", "conv_width"), Scope.MAMBA),
    _mixer("conv1d.bias", ("mamba_conv",), Scope.MAMBA, Content.BIAS),
    _mixer("dt_bias", ("mamba_heads",), Scope.MAMBA, Content.BIAS),
    _mixer("A_log", ("mamba_heads",), Scope.MAMBA, Content.DECAY),
    _mixer("D", ("mamba_heads",), Scope.MAMBA, Content.NORM),
    _mixer("norm.weight", ("mamba_inner",), Scope.MAMBA, Content.NORM),
    _mixer("out_proj.weight", ("hidden", "mamba_inner"), Scope.MAMBA),
    _mixer("q_proj.weight", ("q", "hidden"), Scope.ATTENTION),
    _mixer("k_proj.weight", ("kv", "hidden"), Scope.ATTENTION),
    _mixer("v_proj.weight", ("kv", "hidden"), Scope.ATTENTION),
    _mixer("o_proj.weight", ("hidden", "q"), Scope.ATTENTION),
    _mixer("up_proj.weight", ("ffn", "hidden"), Scope.DENSE),
    _mixer("down_proj.weight", ("hidden", "ffn"), Scope.DENSE),
    _mixer("gate.weight", ("experts", "hidden"), Scope.MOE),
    _mixer("gate.e_score_correction_bias", ("experts",), Scope.MOE, Content.SCORE_BIAS),
    _mixer("experts.{expert}.up_proj.weight", ("moe_ffn", "hidden"), Scope.EXPERT),
    _mixer("experts.{expert}.down_proj.weight", ("hidden", "moe_ffn"), Scope.EXPERT),
    _mixer("shared_experts.up_proj.weight", ("shared_ffn", "hidden"), Scope.MOE),
    _mixer("shared_experts.down_proj.weight", ("hidden", "shared_ffn"), Scope.MOE),
    _HYBRID_FINAL_NORM,
    _LM_HEAD,
)

_HYBRID_LAYERS = {
    "M": frozenset({Scope.LAYER, Scope.MAMBA}),
    "*": frozenset({Scope.LAYER, Scope.ATTENTION}),
    "-": frozenset({Scope.LAYER, Scope.DENSE}),
    "E": frozenset({Scope.LAYER, Scope.MOE, Scope.EXPERT}),
}
"""Letter of ``hybrid_override_pattern`` -> scopes of the rows that such a layer has."""

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
            name="qwen2",
            architecture="Qwen2ForCausalLM",
            model_type="qwen2",
            tensors=(*_FRAME, *_GQA, *_QKV_BIAS, *_DENSE_MLP),
            requires={"quantization_config": (None,)},
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
        Family(
            name="nemotron-h",
            architecture="NemotronHForCausalLM",
            model_type="nemotron_h",
            tensors=_HYBRID,
            embedding=_HYBRID_EMBEDDING,
            final_norm=_HYBRID_FINAL_NORM,
            requires={
                **_NO_BIAS,
                "use_bias": (False, None),
                "mamba_proj_bias": (False, None),
                "use_conv_bias": (True, None),
                "conv_kernel": (4, None),
                "moe_latent_size": (None,),
                "n_shared_experts": (1, None),
                "num_nextn_predict_layers": (0, None),
                "tie_word_embeddings": (False, None),
            },
            needs=("hybrid_override_pattern",),
        ),
    )
}


def family_of(config: Mapping[str, JSON]) -> Family | None:
    """Return the row that describes checkpoints with this config.json, or None if no row does."""
    architectures = config.get("architectures")
    for row in FAMILIES.values():
        if isinstance(architectures, list) and architectures[:1] == [row.architecture]:
            holds = all(config.get(key) in allowed for key, allowed in row.requires.items())
            complete = all(config.get(key) is not None for key in row.needs)
            return row if holds and complete else None
    return None


def num_experts_of(config: Mapping[str, Any]) -> int:
    """Return the number of routed experts of a layer that has them, under any family's key; 0 for a dense model."""
    if "E" not in str(config.get("hybrid_override_pattern") or "E"):
        return 0
    return next((_size(config, key) for key in _EXPERT_COUNTS if config.get(key)), 0)


def size_if_any(config: Mapping[str, JSON], key: str) -> int | None:
    """Return one size of a config.json; None where the key is absent or null.

    Raises:
        UsageError: it is no positive integer.
    """
    return None if config.get(key) is None else _size(config, key)


def layer_scopes(config: Mapping[str, JSON]) -> tuple[frozenset[Scope], ...]:
    """Return the scopes of the rows that each layer has, in layer order.

    Args:
        config: config.json of a checkpoint that has a family row.

    Raises:
        UsageError: a hybrid's pattern has an unknown letter, or another length than the model has layers.
    """
    layers = _size(config, "num_hidden_layers")
    pattern = config.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        if len(pattern) != layers or not set(pattern) <= _HYBRID_LAYERS.keys():
            raise UsageError(
                f"config.json has `hybrid_override_pattern` = {pattern!r} where {layers} letters of "
                f"{''.join(_HYBRID_LAYERS)} are needed"
            )
        return tuple(_HYBRID_LAYERS[letter] for letter in pattern)
    first_moe = _size(config, "first_k_dense_replace", 0) if num_experts_of(config) else layers
    dense, sparse = frozenset({Scope.LAYER, Scope.DENSE}), frozenset({Scope.LAYER, Scope.MOE, Scope.EXPERT})
    return tuple(dense if layer < first_moe else sparse for layer in range(layers))


def sizes_of(config: Mapping[str, JSON]) -> dict[str, int]:
    """Return the sizes that tensor rows and Megatron placements refer to by name, in elements.

    Sizes that do not apply to the family are absent.

    Args:
        config: config.json of a checkpoint that has a family row.
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
    if experts := num_experts_of(config):
        width = _size(config, "moe_intermediate_size")
        shared = _size(config, "moe_shared_expert_intermediate_size", width * _size(config, "n_shared_experts", 0))
        sizes |= {"experts": experts, "moe_ffn": width, "shared_ffn": shared}
    if config.get("mamba_num_heads") is not None:
        mamba_heads, groups = _size(config, "mamba_num_heads"), _size(config, "n_groups")
        inner, state = mamba_heads * _size(config, "mamba_head_dim"), groups * _size(config, "ssm_state_size")
        sizes |= {
            "mamba_heads": mamba_heads,
            "mamba_inner": inner,
            "mamba_state": state,
            "mamba_conv": inner + 2 * state,
            "mamba_in": 2 * inner + 2 * state + mamba_heads,
            "conv_width": _size(config, "conv_kernel", 4),
            "one": 1,
        }
    return sizes


def _size(config: Mapping[str, JSON], key: str, default: int | None = None) -> int:
    """Return one size, or `default` where the key is absent or null; 0 is valid only where it is the default."""
    value = config.get(key)
    if value is None and default is not None:
        return default
    least = 0 if default == 0 else 1
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise UsageError(f"config.json has `{key}` = {value!r} where a positive integer is needed")
    return value


def tensors_of(family: Family, config: Mapping[str, JSON]) -> Iterator[TensorSpec]:
    """Yield every tensor of a checkpoint of this family and config, in layer order.

    With tied embeddings there is no ``lm_head.weight``, as in published checkpoints.
    """
    sizes = sizes_of(config)
    tied = bool(config.get("tie_word_embeddings"))
    yield from _expand(family.embedding, sizes, None)
    for layer, scopes in enumerate(layer_scopes(config)):
        for row in family.tensors:
            if row.scope in scopes:
                yield from _expand(row, sizes, layer)
    yield from _expand(family.final_norm, sizes, None)
    if not tied:
        yield from _expand(_LM_HEAD, sizes, None)


def _expand(row: TensorRow, sizes: Mapping[str, int], layer: int | None) -> Iterator[TensorSpec]:
    shape = tuple(sizes[dim] for dim in row.dims)
    for expert in range(sizes["experts"]) if row.scope is Scope.EXPERT else (None,):
        name = row.pattern.format(layer=layer, expert=expert)
        yield TensorSpec(name=name, shape=shape, content=row.content)
