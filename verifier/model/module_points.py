"""Points of a model at which trainer and transformers hold the same values, by kind of module: one row each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ModulePoint:
    """One point within a layer, or, without a layer, of the whole model."""

    name: str
    """Megatron's name of the module within its layer, or of what happens there where no module has it."""
    elsewhere: str | None = None
    """Attribute path of the module in Megatron, where it is not the name."""
    side: str = "output"
    """"output", or "input" with the number of the argument."""
    argument: int = 0
    columns: str = "whole"
    """Cut of the columns over tensor-parallel ranks: "whole", none; "split", equal slices; "keys", the same, or one
    key-value head that several ranks have; "qkv", "gated", "mixer", slices within each part of a merged linear."""
    needs: str = ""
    """End of the module's class name, where modules of other classes only pass on what they get."""
    theirs: tuple[str, ...]
    """transformers' modules, whose values are put beside one another: paths from "layer", "attention", "mlp", "mamba"
    or "model", with "<" behind where the value is the module's input; "attention:query" and "attention:key" are what
    attention gets, "experts:gates" the weight of each expert."""

    @property
    def module(self) -> str:
        """Attribute path of the module in Megatron."""
        return self.name if self.elsewhere is None else self.elsewhere


LAYER_POINTS = (
    ModulePoint(name="input_layernorm", needs="Norm", theirs=("layer.input_layernorm",)),
    ModulePoint(name="self_attention.linear_q_down_proj", theirs=("attention.q_a_proj",)),
    ModulePoint(name="self_attention.linear_kv_down_proj", theirs=("attention.kv_a_proj_with_mqa",)),
    ModulePoint(name="self_attention.linear_q_up_proj", columns="split", theirs=("attention.q_b_proj",)),
    ModulePoint(name="self_attention.linear_kv_up_proj", columns="split", theirs=("attention.kv_b_proj",)),
    ModulePoint(
        name="self_attention.linear_qkv", columns="qkv",
        theirs=("attention.q_proj", "attention.k_proj", "attention.v_proj"),
    ),
    ModulePoint(name="self_attention.q_layernorm", columns="split", needs="Norm", theirs=("attention.q_norm",)),
    ModulePoint(name="self_attention.k_layernorm", columns="keys", needs="Norm", theirs=("attention.k_norm",)),
    ModulePoint(
        name="self_attention.rotary_query", elsewhere="self_attention.core_attention", side="input", columns="split",
        theirs=("attention:query",),
    ),
    ModulePoint(
        name="self_attention.rotary_key", elsewhere="self_attention.core_attention", side="input", argument=1,
        columns="keys", theirs=("attention:key",),
    ),
    ModulePoint(
        name="self_attention.core_attention", elsewhere="self_attention.linear_proj", side="input", columns="split",
        theirs=("attention.o_proj<",),
    ),
    ModulePoint(name="self_attention.linear_proj", needs="Linear", theirs=("attention.o_proj",)),
    ModulePoint(name="mixer.in_proj", columns="mixer", theirs=("mamba.in_proj",)),
    ModulePoint(
        name="mixer.scan", elsewhere="mixer.out_proj", side="input", columns="split", theirs=("mamba.out_proj<",)
    ),
    ModulePoint(name="mixer.out_proj", theirs=("mamba.out_proj",)),
    ModulePoint(
        name="self_attn_bda", elsewhere="pre_mlp_layernorm", side="input", theirs=("layer.post_attention_layernorm<",)
    ),
    ModulePoint(name="pre_mlp_layernorm", needs="Norm", theirs=("layer.post_attention_layernorm",)),
    ModulePoint(name="mlp.router", theirs=("experts:gates",)),
    ModulePoint(name="mlp.shared_experts", theirs=("mlp.shared_experts",)),
    ModulePoint(name="mlp.linear_fc1", columns="gated", theirs=("mlp.gate_proj", "mlp.up_proj")),
    ModulePoint(name="mlp.linear_fc1", columns="split", theirs=("mlp.up_proj",)),
    ModulePoint(
        name="mlp.activation_func", elsewhere="mlp.linear_fc2", side="input", columns="split",
        theirs=("mlp.down_proj<",),
    ),
    ModulePoint(name="mlp.linear_fc2", needs="Linear", theirs=("mlp.down_proj",)),
    ModulePoint(name="mlp.experts", elsewhere="mlp", needs="MoELayer", theirs=("mlp",)),
    ModulePoint(name="output", elsewhere="", theirs=("layer",)),
)  # fmt: skip
"""Points of each layer, in the order of the data flow."""
EMBEDDING = ModulePoint(name="embedding", theirs=("model.embed_tokens", "model.embeddings"))
LAST_POINTS = (
    ModulePoint(name="final_layernorm", elsewhere="decoder.final_layernorm", theirs=("model.norm",)),
    ModulePoint(name="final_layernorm", elsewhere="decoder.final_norm", theirs=("model.norm_f",)),
    ModulePoint(name="output_layer", columns="split", theirs=("lm_head",)),
)
OF_THE_LOSS = ("logprob", "entropy")
"""Points behind the model: log-probability of each label and entropy of its distribution, nats."""
_NAMES = list(dict.fromkeys(point.name for point in LAYER_POINTS))
_LAST = list(dict.fromkeys(point.name for point in LAST_POINTS)) + list(OF_THE_LOSS)
_ROOM = 100
"""More than a layer has points."""


def order_of(point: str, num_layers: int) -> int:
    """Place of a point in the data flow, by its whole name; later points have greater ones."""
    if point == EMBEDDING.name:
        return 0
    if point in _LAST:
        return (num_layers + 1) * _ROOM + _LAST.index(point)
    _, layer, name = point.split(".", 2)
    return (int(layer) + 1) * _ROOM + _NAMES.index(name)
