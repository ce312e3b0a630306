"""Settings of a trainer against the checkpoint's config.json, key by key."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

from msgspec import structs

import verifier.stages.logprob.checks_stated as stated
from verifier.config_json import Config, epsilon, has_delta_nets, head_dim, is_latent, rope, rotary_dim
from verifier.core.check import LOOP, At, Comparison, Given, Stage, Trace, check, compare_value
from verifier.core.condition import ALWAYS, NEEDS, on
from verifier.core.manifest import MeshSizes
from verifier.mesh import Coordinate, Mesh
from verifier.stages.checks_conditions import ADAPTER, GRPO, REFERENCE, UPDATED
from verifier.stages.load.records import StatedConfig
from verifier.stages.logprob.records import (
    LAYER_WINDOWS,
    NORM_EPSILONS,
    ROTARY_FREQUENCIES,
    AdapterScales,
    GivenArguments,
    ProviderFields,
    ReferenceShard,
)
from verifier.stages.pack.records import PackLayout

Wanted = Callable[[Config], Any]
"""Value that a config.json asks for; an ellipsis where it asks for none."""


class Row(NamedTuple):
    """Keys of config.json and their counterpart in Megatron."""

    keys: str
    """Keys, the first of which names the row."""
    field: str
    """Field of the provider, or several that together say the same."""
    want: Wanted
    got: Callable[[Config], Any] | None = None
    """The counterpart's value in terms of config.json; None where the field has it as it is."""


def _same(key: str, field: str = "", only: Wanted = lambda config: True) -> Row:
    """Row of a key and a field that hold the same value, in the models for which `only` is true."""
    return Row(key, field or key, lambda config: value_stated(config, key) if only(config) else ...)


def _bound(key: str, field: str = "", want: Wanted | None = None) -> Row:
    """Row of a number, or a bound of activations, scores or logits, of which null and absent say that there is none."""
    name = field or key
    return Row(key, name, want or (lambda config: config.get(key, ...)), lambda fields: fields.get(name))


def value_stated(config: Config, key: str) -> Any:
    """Value of a key; an ellipsis for null, which leaves it to the architecture."""
    return ... if config.get(key) is None else config[key]


def _rope(key: str, field: str, got: Callable[[Config], Any] | None = None) -> Row:
    return Row(
        f"rope_scaling.{key}", field, lambda config: rope(config).get(key, ...),
        got or (lambda fields: fields.get(_yarn(fields, field), ...)),
    )  # fmt: skip


def _yarn(fields: Config, field: str) -> str:
    """Name of a field of YaRN: latent attention has its own, without the prefix."""
    return field.removeprefix("yarn_") if fields.get("multi_latent_attention") else field


TRAINER = (
    *map(_same, ("hidden_size", "num_attention_heads", "vocab_size", "attention_dropout", "hidden_dropout")),
    _same("num_hidden_layers", "num_layers"),
    _same("intermediate_size", "ffn_hidden_size"),
    _same("num_key_value_heads", "num_query_groups"),
    _same("max_position_embeddings", "seq_length", lambda config: not is_latent(config)),
    _same("tie_word_embeddings", "share_embeddings_and_output_weights"),
    _same("mlp_bias", "add_bias_linear"),
    Row("attention_bias", "add_qkv_bias", stated.attention_bias, stated.trainer_attention_bias),
    Row("head_dim hidden_size num_attention_heads", "kv_channels", head_dim),
    Row("rms_norm_eps layer_norm_epsilon norm_eps layer_norm_eps", "layernorm_epsilon", epsilon),
    Row("hidden_act hidden_activation mlp_hidden_act", "activation_func", stated.activation),
    Row(
        "sliding_window use_sliding_window layer_types max_window_layers", "window_size", stated.window,
        stated.trainer_window,
    ),
    Row(
        "softmax_scale query_pre_attn_scalar attention_multiplier", "softmax_scale", stated.softmax_scale,
        stated.trainer_softmax_scale,
    ),
    Row("rope_theta", "rotary_base", stated.rope_theta),
    Row("partial_rotary_factor", "rotary_percent", stated.rotary_share),
    Row("rope_type rope_scaling rope_parameters", "rope scaling", stated.rope_type, stated.trainer_rope_type),
    _rope("factor", "yarn_rotary_scaling_factor", stated.trainer_rope_factor),
    _rope("low_freq_factor", "(1 in megatron-core)", lambda fields: 1),
    _rope("high_freq_factor", "(4 in megatron-core)", lambda fields: 4),
    Row(
        "rope_scaling.original_max_position_embeddings", "original_max_position_embeddings",
        stated.original_length, stated.trainer_original_length,
    ),
    *(_rope(key, f"yarn_{key}") for key in ("beta_fast", "beta_slow", "mscale", "mscale_all_dim")),
    Row("rope_scaling.attention_factor", "yarn_mscale", stated.stated_magnitude, stated.trainer_magnitude),
    Row(
        "rope_scaling.truncate", "yarn_correction_range_round_to_int", stated.rounds_range,
        lambda fields: bool(fields.get("yarn_correction_range_round_to_int")),
    ),
    _bound("num_experts n_routed_experts num_local_experts moe_num_experts", "num_moe_experts", stated.experts),
    _same("num_experts_per_tok", "moe_router_topk", stated.has_experts),
    _same("moe_intermediate_size", "moe_ffn_hidden_size", stated.has_experts),
    _same("n_group", "moe_router_num_groups", stated.has_experts),
    _same("topk_group", "moe_router_group_topk", stated.has_experts),
    _same("routed_scaling_factor", "moe_router_topk_scaling_factor", stated.has_experts),
    _same("scoring_func", "moe_router_score_function", stated.has_experts),
    _same("norm_topk_prob", "moe_router_pre_softmax", stated.has_experts)._replace(got=stated.trainer_normalises),
    Row(
        "moe_shared_expert_intermediate_size shared_expert_intermediate_size n_shared_experts",
        "moe_shared_expert_intermediate_size", stated.shared_width,
    ),
    Row(
        "first_k_dense_replace mlp_only_layers decoder_sparse_step moe_layer_freq", "moe_layer_freq",
        stated.sparse_layers, stated.trainer_sparse_layers,
    ),
    *(_same(key, only=is_latent) for key in ("q_lora_rank", "kv_lora_rank", "v_head_dim")),
    _same("qk_nope_head_dim", "qk_head_dim", is_latent),
    _same("qk_rope_head_dim", "qk_pos_emb_head_dim", is_latent),
    *(_same(key, only=stated.is_hybrid) for key in ("mamba_num_heads", "mamba_head_dim")),
    *(_same(f"linear_{key}", only=has_delta_nets) for key in ("num_key_heads", "num_value_heads", "conv_kernel_dim")),
    *(_same(f"linear_{key}_head_dim", only=has_delta_nets) for key in ("key", "value")),
    _same("ssm_state_size", "mamba_state_dim", stated.is_hybrid),
    _same("n_groups", "mamba_num_groups", stated.is_hybrid),
    _same("chunk_size", "mamba_chunk_size", stated.is_hybrid),
    Row("hybrid_override_pattern mtp_hybrid_override_pattern", "hybrid_layer_pattern", stated.hybrid_layers),
    _same("residual_in_fp32", "fp32_residual_connection", stated.is_hybrid),
    _bound("swiglu_limit", "activation_func_clamp_value", stated.glu_limit),
    Row("moe_router_dtype", "moe_router_dtype", stated.router_dtype, stated.trainer_router_dtype),
    *map(_bound, ("attn_logit_softcapping", "final_logit_softcapping")),
)  # fmt: skip
"""Every key of config.json that has a counterpart in the trainer, and how the one says the other."""

ENGINE_KEYS = frozenset(key for row in TRAINER for key in row.keys.split())
"""Keys of config.json that are compared with the engine's own configuration of its model."""


FREQUENCY = 1e-5
"""Share of a rotary frequency that it may be off by."""


@check("LGP007", needs=(StatedConfig, ProviderFields), applies=on(roundtrip=ALWAYS, step=UPDATED, loop=NEEDS))
def trainer_setting_differs_from_config(trace: Trace) -> Iterator[Comparison]:
    """The trainer computes with the sizes, ropes, windows, scales and routers of the checkpoint's config.json.

    What it checks: on every rank, in training on one of each pipeline stage, each key of config.json that has a
    counterpart in megatron-bridge's provider, which is Megatron's TransformerConfig, against it, by an explicit table
    (`TRAINER` in `verifier/stages/logprob/checks_configs.py`). Keys that config.json does not have count as what
    transformers takes for them. The window of each layer's live attention against the kind of that layer, the epsilon
    of each live norm of the decoder, and the live frequencies of plain rotary embeddings, which no checkpoint has,
    against their formula.
    Why it matters: a window of 2,048 or in the other layers, a rope that scales from position 4,096 on, a bound of
    gated units, or an epsilon or a router's dtype below the noise of bf16 changes nothing that a short run computes.
    Evidence: load/stated-config, logprob/provider.
    Tolerance and its source: exact, numbers as float64; a provider is derived by copying. A frequency 1e-5 of itself:
    float32 rounds the exponent of a base up to 1e7 by 1e-6 of the power.
    Where to look: how megatron-bridge derives this field from config.json, which layers it gives a window, and what
    fills and casts buffers that no checkpoint has.
    What it does not catch: keys without a counterpart, which its outcome names in JSON reports; a module that computes
    with other values than the provider's (LGP001); what megatron-core derives from a field.
    References: Megatron-Bridge#5097, transformers#38002, slime#1734, Megatron-Bridge#4875, Megatron-Bridge#4610,
    Megatron-Bridge#5712, torchtune#218, SkyRL#1725.
    """
    config = values_of(next(trace.of(StatedConfig)))
    rest = sorted(config.keys() - ENGINE_KEYS - stated.NOT_OF_THE_FORWARD)
    for item in trace.of(ProviderFields):
        fields = stated.cutting_windows(values_of(item), config)
        for row in TRAINER:
            key, wanted = row.keys.split()[0], row.want(config)
            if wanted is ...:
                continue
            found = row.got(fields) if row.got else fields.get(row.field, ...)
            got, want = text_of(found), text_of(wanted)
            subject, says = f"`{key}` of the trainer, where it is `{row.field}`,", ("the provider", "config.json")
            found = compare_value(_at(item), f"config.json {key}", got, want, subject=subject, says=says)
            yield replace(found, left_out=tuple(rest))
        yield from _windows_of_layers(item, fields, config)
        yield from _epsilons_of_norms(item, fields, config)
        yield from _frequencies(item, fields, config)


def _at(item: ProviderFields) -> At:
    return At(Stage.LOGPROB, owner=f"trainer rank {item.rank}")


def _windows_of_layers(item: ProviderFields, fields: Config, config: Config) -> Iterator[Comparison]:
    wanted = stated.layer_windows(config)
    if wanted is None:
        return
    for layer, found in fields.get(LAYER_WINDOWS, {}).items():
        want = wanted[int(layer)]
        got, asked = (f"{size} rows before its own" if size is not None else "all" for size in (found, want))
        says, subject = ("the layer's attention", "config.json"), f"what a row of layer {layer} sees in the trainer"
        what, same = f"window of layer {layer}", found == want
        yield compare_value(_at(item), what, got, asked, same=same, subject=subject, says=says)


def _epsilons_of_norms(item: ProviderFields, fields: Config, config: Config) -> Iterator[Comparison]:
    wanted = epsilon(config)
    if wanted is ...:
        return
    want = text_of(wanted)
    for name, values in fields.get(NORM_EPSILONS, {}).items():
        got = ", ".join(map(text_of, values))
        says, subject = ("the live norms", "config.json"), f"the epsilon of `{name}` of the trainer"
        yield compare_value(_at(item), f"epsilon of {name}", got, want, subject=subject, says=says)


def _frequencies(item: ProviderFields, fields: Config, config: Config) -> Iterator[Comparison]:
    """Frequencies of rotary embeddings that nothing scales; not of latent attention."""
    base, size = stated.rope_theta(config), rotary_dim(config)
    if stated.rope_type(config) != "default" or is_latent(config) or base is ... or size is ...:
        return
    want = [float(base) ** (-at / size) for at in range(0, size, 2)]
    for path, got in fields.get(ROTARY_FREQUENCIES, {}).items():
        live = [*got, *[math.nan] * (len(want) - len(got))]
        off = [abs(a / b - 1) for a, b in zip(live, want, strict=False)]
        at = max(range(len(off)), key=lambda at: off[at] if off[at] == off[at] else math.inf)
        same = len(got) == len(want) and off[at] <= FREQUENCY
        subject = f"the radians a position of pair {at} of `{path}` in the trainer"
        says = f"{len(got)} live pairs", f"{len(want)} pairs by rope_theta of config.json"
        words, what = f"{FREQUENCY:g} of it (float32 rounds a power)", f"frequencies of {path}"
        sides, gap, most = (live[at], want[at]), off[at], FREQUENCY
        texts: Given = {"subject": subject, "says": says}
        yield compare_value(_at(item), what, *sides, same=same, allowed=words, bound=most, gap=gap, **texts)


def values_of(item: StatedConfig | ProviderFields) -> Config:
    """Values of a recorded config by key."""
    return {key: json.loads(value) for key, value in item.values.items()}


def text_of(value: Any) -> str:
    """A value as text: 4 and 4.0 are the same number."""
    if value is ...:
        return "absent"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{float(value):.15g}"
    return json.dumps(value)


ROUNDING = {"float32": 2.0**-22, "bfloat16": 2.0**-7}
"""Twice the greatest relative error of two roundings, of the scale and of the product, by type."""


@check("LGP016", needs=(AdapterScales,), applies=on(step=UPDATED & ADAPTER))
def adapter_scaled_otherwise(trace: Trace) -> Iterator[Comparison]:
    """Each adapter multiplies all of its input by its matrices and by alpha over rank, as whoever merges it does.

    What it checks: per rank, update and adapter, in the first pass of the update: each element of the adapter's output
    against that of its second matrix, times alpha over rank of the config. Of an adapter that has not moved, whose
    second matrix is 0, both are 0. What its first matrix is given, against what the adapter is.
    Why it matters: an adapter that is scaled by alpha alone, or by the root of its rank, trains well, and is another
    one once it is merged or served: of fine-tuning in bf16 nothing else compares the two. Dropout of its input, which
    no config asks for, trains against noise.
    Evidence: logprob/adapter-scales.
    Tolerance and its source: four roundings of the output's type, of the greatest element; an input is the same tensor.
    Where to look: what the forward pass multiplies an adapter's output by, and what stands before its first matrix:
    dropout, a cast, a norm.
    What it does not catch: matrices that are applied in another order, or adapters that are given the input of another
    linear (LGP001, LSS001); adapters of experts.
    References: mlx-vlm#841, TensorRT-LLM#1668, verl#4708.
    """
    for item in trace.of(AdapterScales):
        for adapter in item.adapters:
            gap, bound = float(adapter.gap), ROUNDING[adapter.dtype] * float(adapter.greatest)
            what = f"{adapter.name} in {item.name} on rank {item.rank}"
            subject = f"the scale of `{adapter.name}` in {item.name}"
            scale, asked, says = float(adapter.scale), float(item.asked), ("", "alpha over rank of the config")
            words = f"{bound:.3g} of an element (four roundings of {adapter.dtype})"
            yield compare_value(
                item, what, scale, asked, subject=subject, says=says, allowed=words, bound=bound, gap=gap
            )
            subject = f"the gap of what the first matrix of `{adapter.name}` and the adapter are given in {item.name}"
            yield compare_value(item, f"input of {what}", float(adapter.altered), 0.0, subject=subject)


@check("LGP008", needs=(GivenArguments, PackLayout), applies=on(roundtrip=ALWAYS, step=UPDATED, loop=NEEDS))
def packed_arguments_disagree(trace: Trace) -> Iterator[Comparison]:
    """Arguments of a forward pass over a packed micro-batch agree with the pack, and with each other.

    What it checks: on every rank, for each model chunk and micro-batch of passes that score all sequences or train:
    cumulative lengths of queries and keys, real and padded, against those of the pack; the greatest length, the number
    of all rows and the flag for padding between sequences against what follows from them; the rows of the tokens.
    Why it matters: most of these arguments are redundant. The CPU tier's kernels read some, those of a GPU others, so a
    wrong one is right on one of them. With context parallelism padding after the last sequence lies between its parts:
    each of the 2 cp parts is attended to by itself, and Transformer Engine takes them for equally long if it is told of
    no padding.
    Evidence: logprob/arguments, pack/layout.
    Tolerance and its source: exact; integers that follow from each other.
    Where to look: what makes the arguments of the forward pass.
    What it does not catch: cumulative lengths that are wrong in the pack too (PCK002), arguments that change inside of
    the model (LGP001), those that the installed Megatron does not take (`pad_between_seqs` before 0.19).
    References: RL#4070, TransformerEngine#3331, Megatron-Bridge#4400, SkyRL#2056.
    """
    mesh = Mesh(**structs.asdict(trace.manifest.mesh or MeshSizes(dp=max(trace.manifest.world_size, 1))))
    known = trace.has(ProviderFields)
    hybrid = any(item.values.get("is_hybrid_model") == "true" for item in trace.of(ProviderFields))
    layouts = {}
    for pack in trace.of(PackLayout):  # of ranks of the first tensor and pipeline coordinate
        at = mesh.coordinate(pack.rank)
        layouts[at.dp, at.cp, pack.name, pack.version] = pack
    for item in trace.of(GivenArguments):
        at = mesh.coordinate(item.rank)
        layout = layouts.get((at.dp, at.cp, item.name, item.version))
        if layout is None:
            yield _told(item, at, "pack", "recorded", "absent", absent=True)
            continue
        ends, padded = layout.cu_seqlens, layout.cu_seqlens_padded
        if trace.manifest.command == LOOP and item.cu_seqlens_q == padded:
            ends = padded  # causal attention gives tokens nothing of the padding behind them
        longest = max(end - begin for begin, end in pairwise(padded))
        last = None if mesh.cp > 1 else -1
        for key, want in (
            ("cu_seqlens_q", ends), ("cu_seqlens_kv", ends), ("cu_seqlens_q_padded", padded),
            ("cu_seqlens_kv_padded", padded), ("max_seqlen_q", longest), ("max_seqlen_kv", longest),
            ("total_tokens", padded[-1] if hybrid else None), ("pad_between_seqs", int(ends[:last] != padded[:last])),
            ("num_rows", padded[-1] // mesh.cp),
        ):  # fmt: skip
            if key not in item.lacks and (known or key != "total_tokens"):
                yield _told(item, at, key, want, getattr(item, key))


def _told(
    item: GivenArguments, at: Coordinate, key: str, want: object, got: object, *, absent: bool = False
) -> Comparison:
    want, got = (list(value) if isinstance(value, tuple) else value for value in (want, got))
    says, subject = (f"argument of chunk {item.chunk}", "the pack"), f"`{key}` of the forward pass over {item.name}"
    owner, what = f"trainer rank {item.rank} ({at})", f"{item.name} {key}"
    return compare_value(item, what, got, want, subject=subject, says=says, owner=owner, absent=absent)


@check("LGP010", needs=(ReferenceShard,), applies=on(step=GRPO & UPDATED & REFERENCE, loop=NEEDS))
def reference_moved(trace: Trace) -> Iterator[Comparison]:
    """The reference is scored with the weights that the run began with, in every step.

    What it checks: per rank and tensor, the content that the model held in each pass as the reference, against that of
    the reference when the run was loaded; and that, once, against the live weights that the run began with.
    Why it matters: a reference that is the live model has a KL of 0, one that follows the policy has no anchor, one of
    other weights pulls the policy to them, and the reported KL looks healthy in all.
    Evidence: logprob/reference.
    Tolerance and its source: bitwise; the reference is a copy.
    Where to look: what else writes the reference, and which model scores.
    What it does not catch: a reference that a resume takes from other weights (CKP001); what the first load brings
    (WGT001).
    References: slime#914, RL#3722, trl#6688, trl#1340.
    """
    for item in trace.of(ReferenceShard):
        pairs = [("what it was when it was loaded", "while the reference was scored", item.digest, item.frozen)]
        if item.begun is not None:
            pairs.append(("what the run began with", "when the reference was made", item.frozen, item.begun))
        for wanted, when, found, right in pairs:
            what, sentence = f"{item.name} on rank {item.rank}", f"`{item.name}` of the reference is not {wanted}"
            says = when, wanted.removeprefix("what it was ")
            yield compare_value(item, what, found, right, sentence=sentence, says=says)
