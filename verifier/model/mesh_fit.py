"""Division of a model by a mesh, from the sizes in config.json alone.

Without Transformer Engine's kernel for rotary embeddings Megatron embeds a packed micro-batch one sequence at a time,
twice a layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from verifier.config_json import is_latent, ropes, text_model
from verifier.errors import UsageError
from verifier.mesh import Mesh
from verifier.model.families import num_experts_of, size_if_any


def validate(config: Mapping[str, Any], mesh: Mesh) -> None:
    """Refuse a mesh that does not divide the model with this config.json.

    Raises:
        UsageError: names the axis, the size, and what it does not divide.
    """
    for sentence in misfits(config, mesh):
        raise UsageError(sentence)


def misfits(config: Mapping[str, Any], mesh: Mesh) -> Iterator[str]:
    """Yield each way in which a mesh does not divide the model with this config.json, a sentence each."""
    name, config = architecture_of(config), text_model(config)
    size, experts = partial(size_if_any, config), num_experts_of(config)
    latent = config.get("kv_lora_rank") is not None
    hybrid = config.get("hybrid_override_pattern") is not None
    for axis, parts in (("ep", mesh.ep), ("etp", mesh.etp)):
        if parts > 1 and not experts:
            yield f"{axis} = {parts}, but {name} has no experts"
    if hybrid and mesh.vpp > 1:
        yield f"vpp = {mesh.vpp}, but megatron-bridge builds {name} without virtual stages"
    groups = size("n_groups") if hybrid else size("mamba_n_groups")
    held = groups // mesh.tp if groups and hybrid else None
    cp_parts = 1 if held and mesh.cp % held == 0 else mesh.cp  # 1: every rank has a copy of one group
    heads = None if latent else size("num_key_value_heads")
    shared = heads is not None and mesh.tp % heads == 0  # several ranks have one head's rows between them
    tp, tp_cp = f"tp = {mesh.tp}", f"tp * cp = {mesh.tp} * {mesh.cp}"
    for shown, parts, count, what in (
        (tp, mesh.tp, size("num_attention_heads"), "attention heads"),
        (tp, mesh.tp, None if shared else heads, "key-value heads"),
        (tp, mesh.tp, groups, "groups of the state-space layers"),
        (tp, mesh.tp, size("vocab_size"), "vocabulary entries"),
        (tp, mesh.tp, size("intermediate_size"), "columns of the feed-forward layers"),
        (f"ep = {mesh.ep}", mesh.ep, experts, "experts"),
        (f"etp = {mesh.etp}", mesh.etp, size("moe_intermediate_size") if experts else None, "columns of an expert"),
        (tp_cp, mesh.tp * mesh.cp, size("mamba_num_heads") if hybrid else None, "heads of the state-space layers"),
        (tp_cp, mesh.tp * mesh.cp, size("linear_num_key_heads"), "key heads of the gated delta nets"),
        (f"cp = {mesh.cp}", cp_parts, held, "groups that a tensor-parallel rank holds of the state-space layers"),
    ):
        if count is not None and count % parts:
            yield f"{shown} does not divide the {count:,} {what} of {name}"
    num_layers = size("num_hidden_layers")
    if num_layers is not None:
        try:
            mesh.stage_sizes(num_layers)
        except UsageError as refusal:
            yield str(refusal)


def architecture_of(config: Mapping[str, Any]) -> str:
    """Return the first of a config.json's architectures."""
    return str((config.get("architectures") or ["the model"])[0])


_PLAIN = ("default", "linear", "llama3")
"""Types of rotary embedding that change angles alone, which the kernel is given; YaRN also scales sines and cosines."""


def misfit(model: Mapping[str, Any]) -> str:
    """Reason why the kernel does not fit a model, from its config.json; empty if it fits."""
    if is_latent(model):
        return "latent attention"
    for rope in ropes(model):
        if rope["rope_type"] not in _PLAIN:
            return f"rotary embeddings of type {rope['rope_type']}"
        if "mrope_section" in rope:
            return "rotary embeddings of several axes"
    return ""
