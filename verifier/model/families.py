"""Supported model families: one declarative row each.

A row lists the tensors of the family's checkpoints under their published names, with shapes in terms of the sizes in
``config.json``. `verifier/export/names.py` lists their places in Megatron, independently of Megatron-Bridge.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, TypeVar

from verifier.config_json import EXPERT_COUNTS, text_model
from verifier.errors import UsageError

T = TypeVar("T")
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
    FURTHER = "every layer that predicts a further token (MTP)"


class Content(Enum):
    """Kind of a tensor; decides how its values are generated."""

    MATRIX = "matrix"
    """Mean 0, standard deviation 1/sqrt(last dim)."""
    NORM = "norm"
    """Scale of a norm; near 1 and never 1."""
    SCORE_BIAS = "score bias"
    """Additive bias of router scores; never 0, and float32 in every checkpoint, as published. Scores of chosen experts
    are of either sign, so that a 0 in the place of those of closed groups shows; one constant for all chooses alike."""
    BIAS = "bias"
    """Bias of a linear or convolution; never 0."""
    GATED_BIAS = "bias of a gated unit"
    """Beyond 7, the bound of GPT-OSS, at either end for a quarter of the units; else like `BIAS`."""
    TIME_STEP = "bias of a time step"
    """Steps of a state-space layer begin below 0.001, where published configs have `time_step_min`, and end at 0.7."""
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
_PLAIN = {"quantization_config": (None,), "num_nextn_predict_layers": (0, None)}
_NO_BIAS = {"attention_bias": (False, None), "mlp_bias": (False, None), **_PLAIN}


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the table: an architecture, its tensors, and the settings that the row requires."""

    name: str
    model_type: str
    """``model_type`` in config.json."""
    architecture: str
    """``architectures[0]`` in config.json."""
    tensors: tuple[TensorRow, ...]
    embedding: TensorRow = _EMBEDDING
    final_norm: TensorRow = _FINAL_NORM
    requires: Mapping[str, tuple[JSON, ...]] = field(default_factory=lambda: _NO_BIAS)
    """Key of config.json -> values under which this row describes the checkpoint; an absent key counts as None."""
    needs: tuple[str, ...] = ()
    """Keys of config.json that must not be None: the row has no default for them, or another than the model's class."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSpec:
    """One concrete tensor of one checkpoint."""

    name: str
    shape: tuple[int, ...]
    content: Content


def _rows(
    pattern: str,
    scope: Scope = Scope.LAYER,
    content: Content = Content.MATRIX,
    prefix: str = "model.layers.{layer}.",
    **dims: str,
) -> tuple[TensorRow, ...]:
    """Rows of like tensors of a layer: each keyword replaces the pattern's ``*`` and names the sizes of its dims."""
    return tuple(
        TensorRow(prefix + pattern.replace("*", leaf), tuple(sizes.split()), scope, content)
        for leaf, sizes in dims.items()
    )


def _gated_mlp(pattern: str, scope: Scope, width: str) -> tuple[TensorRow, ...]:
    return _rows(pattern, scope, gate=f"{width} hidden", up=f"{width} hidden", down=f"hidden {width}")


_FRAME = (
    _EMBEDDING,
    *_rows("*_layernorm.weight", content=Content.NORM, input="hidden", post_attention="hidden"),
    _FINAL_NORM,
    _LM_HEAD,
)
_GQA = _rows("self_attn.*_proj.weight", q="q hidden", k="kv hidden", v="kv hidden", o="hidden q")
_QKV_BIAS = _rows("self_attn.*_proj.bias", content=Content.BIAS, q="q", k="kv", v="kv")
_QK_NORM = _rows("self_attn.*_norm.weight", content=Content.NORM, q="head_dim", k="head_dim")
_MLA = (
    *_rows("self_attn.*.weight", q_a_proj="q_lora hidden"),
    *_rows("self_attn.*.weight", content=Content.NORM, q_a_layernorm="q_lora"),
    *_rows("self_attn.*.weight", q_b_proj="mla_q q_lora", kv_a_proj_with_mqa="mla_kv_down hidden"),
    *_rows("self_attn.*.weight", content=Content.NORM, kv_a_layernorm="kv_lora"),
    *_rows("self_attn.*.weight", kv_b_proj="mla_kv_up kv_lora", o_proj="hidden mla_out"),
)
_DENSE_MLP = _gated_mlp("mlp.*_proj.weight", Scope.DENSE, "ffn")
_EXPERTS = (
    *_rows("mlp.*.weight", Scope.MOE, gate="experts hidden"),
    *_gated_mlp("mlp.experts.{expert}.*_proj.weight", Scope.EXPERT, "moe_ffn"),
)
_SHARED_EXPERTS = (
    *_rows("mlp.gate.*", Scope.MOE, Content.SCORE_BIAS, e_score_correction_bias="experts"),
    *_gated_mlp("mlp.shared_experts.*_proj.weight", Scope.MOE, "shared_ffn"),
)
_FURTHER = (
    *_rows("*norm.weight", Scope.FURTHER, Content.NORM, e="hidden", h="hidden", **{"shared_head.": "hidden"}),
    *_rows("*.weight", Scope.FURTHER, eh_proj="hidden two_hidden"),
)

_HYBRID_EMBEDDING = TensorRow("backbone.embeddings.weight", ("vocab", "hidden"), Scope.MODEL)
_HYBRID_FINAL_NORM = TensorRow("backbone.norm_f.weight", ("hidden",), Scope.MODEL, Content.NORM)
_mixer = partial(_rows, prefix="backbone.layers.{layer}.mixer.")
_HYBRID = (
    _HYBRID_EMBEDDING,
    TensorRow("backbone.layers.{layer}.norm.weight", ("hidden",), content=Content.NORM),
    *_mixer("*.weight", Scope.MAMBA, in_proj="mamba_in hidden", conv1d="mamba_conv one conv_width"),
    *_mixer("conv1d.*", Scope.MAMBA, Content.BIAS, bias="mamba_conv"),
    *_mixer("*", Scope.MAMBA, Content.TIME_STEP, dt_bias="mamba_heads"),
    *_mixer("*", Scope.MAMBA, Content.DECAY, A_log="mamba_heads"),
    *_mixer("*", Scope.MAMBA, Content.NORM, D="mamba_heads"),
    *_mixer("*.weight", Scope.MAMBA, Content.NORM, norm="mamba_inner"),
    *_mixer("*.weight", Scope.MAMBA, out_proj="hidden mamba_inner"),
    *_mixer("*_proj.weight", Scope.ATTENTION, q="q hidden", k="kv hidden", v="kv hidden", o="hidden q"),
    *_mixer("*_proj.weight", Scope.DENSE, up="ffn hidden", down="hidden ffn"),
    *_mixer("*.weight", Scope.MOE, gate="experts hidden"),
    *_mixer("gate.*", Scope.MOE, Content.SCORE_BIAS, e_score_correction_bias="experts"),
    *_mixer("experts.{expert}.*_proj.weight", Scope.EXPERT, up="moe_ffn hidden", down="hidden moe_ffn"),
    *_mixer("shared_experts.*_proj.weight", Scope.MOE, up="shared_ffn hidden", down="hidden shared_ffn"),
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

_NUMBERED = re.compile(r"model\.layers\.(\d{1,9})\.")
_LAYER_COUNTS = ("num_hidden_layers", "num_nextn_predict_layers")

FAMILIES: dict[str, Family] = {
    row.name: row
    for row in (
        Family(
            "qwen3",
            "qwen3",
            "Qwen3ForCausalLM",
            (*_FRAME, *_GQA, *_QK_NORM, *_DENSE_MLP),
            needs=("head_dim", "num_key_value_heads"),
        ),
        Family(
            "qwen2",
            "qwen2",
            "Qwen2ForCausalLM",
            (*_FRAME, *_GQA, *_QKV_BIAS, *_DENSE_MLP),
            requires=_PLAIN,
            needs=("num_key_value_heads",),
        ),
        Family("llama", "llama", "LlamaForCausalLM", (*_FRAME, *_GQA, *_DENSE_MLP)),
        Family(
            "qwen3-moe",
            "qwen3_moe",
            "Qwen3MoeForCausalLM",
            (*_FRAME, *_GQA, *_QK_NORM, *_EXPERTS),
            requires={**_NO_BIAS, "decoder_sparse_step": (1, None), "mlp_only_layers": ([], None)},
            needs=("num_key_value_heads", "moe_intermediate_size"),
        ),
        Family(
            "deepseek-v3",
            "deepseek_v3",
            "DeepseekV3ForCausalLM",
            (*_FRAME, *_MLA, *_DENSE_MLP, *_EXPERTS, *_SHARED_EXPERTS, *_FURTHER),
            requires={**_NO_BIAS, "num_nextn_predict_layers": (0, 1, None), "moe_layer_freq": (1, None)},
            needs=("q_lora_rank", "n_shared_experts", "first_k_dense_replace"),
        ),
        Family(
            "nemotron-h",
            "nemotron_h",
            "NemotronHForCausalLM",
            _HYBRID,
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
    config = text_model(config)
    if "E" not in str(config.get("hybrid_override_pattern") or "E"):
        return 0
    return next((_size(config, key) for key in EXPERT_COUNTS if config.get(key)), 0)


def size_if_any(config: Mapping[str, JSON], key: str) -> int | None:
    """Return one size of a config.json; None where the key is absent or null.

    Raises:
        UsageError: it is no positive integer.
    """
    model = text_model(config)
    return None if model.get(key) is None else _size(model, key)


def layer_scopes(config: Mapping[str, JSON]) -> tuple[frozenset[Scope], ...]:
    """Return the scopes of the rows that each layer has, in layer order.

    Raises:
        UsageError: a hybrid's pattern has an unknown letter, or another length than the model has layers.
    """
    config = text_model(config)
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


def further_scopes(config: Mapping[str, JSON]) -> tuple[frozenset[Scope], ...]:
    """Return the scopes of the rows that each layer for further tokens has, which is like the last of the policy's."""
    return (layer_scopes(config)[-1] | {Scope.FURTHER},) * len(_further_layers(config))


def has_score_bias(config: Mapping[str, JSON]) -> bool:
    """Tell whether routers of this model add a bias to the scores that they choose experts by, as its row says."""
    family = family_of(config)
    rows = family.tensors if family else ()
    return any(row.content is Content.SCORE_BIAS for row in rows) and bool(moe_layers_of(config))


def moe_layers_of(config: Mapping[str, JSON]) -> tuple[int, ...]:
    """Return the global indices of the layers with routed experts; see `layer_scopes`."""
    return tuple(layer for layer, scopes in enumerate(layer_scopes(config)) if Scope.EXPERT in scopes)


def sizes_of(config: Mapping[str, JSON]) -> dict[str, int]:
    """Return the sizes that tensor rows and Megatron placements refer to by name; absent where none applies."""
    size = partial(_size, config)
    heads = size("num_attention_heads")
    sizes = {
        "vocab": size("vocab_size"),
        "hidden": size("hidden_size"),
        "two_hidden": 2 * size("hidden_size"),
        "layers": size("num_hidden_layers"),
        "heads": heads,
        "kv_heads": size("num_key_value_heads", heads),
        "ffn": size("intermediate_size"),
    }
    if config.get("kv_lora_rank") is not None:
        nope, rope, value = size("qk_nope_head_dim"), size("qk_rope_head_dim"), size("v_head_dim")
        sizes |= {
            "q_lora": size("q_lora_rank"),
            "kv_lora": size("kv_lora_rank"),
            "mla_q": heads * (nope + rope),
            "mla_kv_down": size("kv_lora_rank") + rope,
            "mla_kv_up": heads * (nope + value),
            "mla_out": heads * value,
        }
    else:
        head_dim = size("head_dim", size("attention_head_dim", sizes["hidden"] // heads))
        sizes |= {"head_dim": head_dim, "q": heads * head_dim, "kv": sizes["kv_heads"] * head_dim}
    if experts := num_experts_of(config):
        width = size("moe_intermediate_size")
        shared = size("moe_shared_expert_intermediate_size", width * size("n_shared_experts", 0))
        sizes |= {"experts": experts, "moe_ffn": width, "shared_ffn": shared}
    if config.get("mamba_num_heads") is not None:
        inner = size("mamba_num_heads") * size("mamba_head_dim")
        state = size("n_groups") * size("ssm_state_size")
        sizes |= {
            "mamba_heads": size("mamba_num_heads"),
            "mamba_inner": inner,
            "mamba_state": state,
            "mamba_conv": inner + 2 * state,
            "mamba_in": 2 * inner + 2 * state + size("mamba_num_heads"),
            "conv_width": size("conv_kernel", 4),
            "one": 1,
        }
    return sizes


def _size(config: Mapping[str, JSON], key: str, default: int | None = None) -> int:
    """Return one size, or `default` where the key is absent or null; 0 is valid only where it is the default.

    Of a feed-forward size for each layer, as Gemma 3n has, the greatest that divides all.
    """
    value = config.get(key)
    if key == "intermediate_size" and isinstance(value, list) and value:
        return math.gcd(*(_size({key: item}, key) for item in value))
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
    for layer, scopes in enumerate((*layer_scopes(config), *further_scopes(config))):
        for row in family.tensors:
            if row.scope in scopes:
                yield from _expand(row, sizes, layer)
    yield from _expand(family.final_norm, sizes, None)
    if not tied:
        yield from _expand(_LM_HEAD, sizes, None)


def copies_of(config: Mapping[str, JSON]) -> dict[str, str]:
    """Name -> tensor whose copy it is, of layers that predict further tokens (MTP) in published checkpoints.

    Such a layer has the model's embedding and head once more. Trainers share them, so no export has the copies.

    Source:
        https://github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md, structure of the MTP modules.
    """
    head = _EMBEDDING.pattern if config.get("tie_word_embeddings") else _LM_HEAD.pattern
    shared = {"embed_tokens.weight": _EMBEDDING.pattern, "shared_head.head.weight": head}
    return {
        f"model.layers.{layer}.{leaf}": whole for layer in _further_layers(config) for leaf, whole in shared.items()
    }


def predicts_further(name: str, config: Mapping[str, JSON]) -> bool:
    """Test for a tensor of a layer for further tokens (MTP), which transformers and vLLM's policies leave out.

    Source:
        vLLM 0.21.0, `get_spec_layer_idx_from_weight_name` in models/deepseek_v2.py and models/glm4_moe.py; and models
        that skip "mtp.", such as qwen3_next.py.
    """
    found = _NUMBERED.match(name)
    return name.startswith("mtp.") or (found is not None and int(found[1]) in _further_layers(config))


def is_served(name: str, config: Mapping[str, JSON]) -> bool:
    """Test for a tensor that a policy of text has: of no layer for further tokens, and of no part that reads images."""
    return not (predicts_further(name, config) or name.startswith("model.visual."))


def served(tensors: Mapping[str, T], config: Mapping[str, JSON]) -> dict[str, T]:
    """Tensors by checkpoint name that an engine is to hold of what is exported; see `is_served`."""
    return {name: tensor for name, tensor in tensors.items() if is_served(name, config)}


def _further_layers(config: Mapping[str, JSON]) -> range:
    first, more = (_size(config, key, 0) for key in _LAYER_COUNTS)
    return range(first, first + more)


def _expand(row: TensorRow, sizes: Mapping[str, int], layer: int | None) -> Iterator[TensorSpec]:
    shape = tuple(sizes[dim] for dim in row.dims)
    for expert in range(sizes["experts"]) if row.scope is Scope.EXPERT else (None,):
        name = row.pattern.format(layer=layer, expert=expert)
        yield TensorSpec(name=name, shape=shape, content=row.content)


def missed_row(config: Mapping[str, JSON]) -> str:
    """Sentence on the first condition that a config does not meet, and what that costs; empty where there is none."""
    row = next((item for item in FAMILIES.values() if item.model_type == config.get("model_type")), None)
    if row is None or family_of(config) is not None:
        return ""
    return (
        f"the hand-written row {row.name} does not hold for this model: config.json has {unmet(row, config)}; "
        "without it there are no adapters, `verifier train` does not judge what its ranks load, and a load that errs "
        "alike on all ranks is seen in log-probabilities alone (LGP001)"
    )


def unmet(row: Family, config: Mapping[str, JSON]) -> str:
    """Clause on the first condition of a row that a config does not meet."""
    names = config.get("architectures")
    if not isinstance(names, list) or names[:1] != [row.architecture]:
        return f"`architectures` = {json.dumps(names)}, where it needs [{row.architecture}]"
    for key, allowed in row.requires.items():
        if config.get(key) not in allowed:
            values = " or ".join("none" if value is None else json.dumps(value) for value in allowed)
            return f"`{key}` = {json.dumps(config.get(key))}, where it needs {values}"
    return f"no `{next(key for key in row.needs if config.get(key) is None)}`, which it needs"
