"""Mapping of a vLLM rank's tensors back to checkpoint names, independent of vLLM's weight loaders."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import nn
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import PPMissingLayer

from verifier.engine.api import EngineSlice
from verifier.engine.stored_tensors import adapter_places, slice_of
from verifier.engine.vllm.experts_vllm import CHILD, LAYER
from verifier.engine.vllm.stored_tensors_vllm import packed_linears, unpack_experts
from verifier.errors import ContractError

_WITHIN_IMAGES = (("language_model.lm_head.", "lm_head."), ("language_model.model.", "model.language_model."))
_SPELLINGS = {
    "NemotronHForCausalLM": (("model.embed_tokens.", "backbone.embeddings."), ("model.", "backbone.")),
    **dict.fromkeys(("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), _WITHIN_IMAGES),
}
"""Model class -> (prefix of vLLM's names, prefix in checkpoints); the first match counts."""
_RUNS = ("in_proj", "conv1d", "in_proj_qkvz")
"""Last names of linears whose first runs of rows are one checkpoint tensor: all of a state-space layer's (z, x, B, C,
dt) and of its convolution's, q, k and v of a gated delta net."""


class Part(NamedTuple):
    """Run of rows of a linear, of columns in a row-parallel one, that belongs to one checkpoint tensor."""

    name: str
    """Checkpoint tensor without ``.weight``."""
    size: int
    """Number of them on this rank."""
    begin: int
    """First one in the checkpoint tensor."""


def checkpoint_slices(model: nn.Module, carried: Collection[str]) -> Iterator[EngineSlice]:
    """Describe this rank's part of every checkpoint tensor, once per tensor that holds it; none of other stages' is.

    `carried` are the names in the checkpoint; they decide whether a head is its own tensor or tied to the embedding.

    Raises:
        ContractError: the parts of a fused layer have no known checkpoint names, or a packed expert weight cannot be
            read back.
    """
    for part in _slices(model, carried):
        yield replace(part, name=_published(model, part.name))
    modules = model.named_modules()
    absent = tuple(_published(model, f"{path}.") for path, item in modules if isinstance(item, PPMissingLayer))
    for name in sorted(name for name in carried if absent and name.startswith(absent)):
        yield slice_of(name, "", torch.empty(0))


def _published(model: nn.Module, name: str) -> str:
    for ours, published in _SPELLINGS.get(type(model).__name__, ()):
        if name.startswith(ours):
            return published + name.removeprefix(ours)
    return name


def _slices(model: nn.Module, carried: Collection[str]) -> Iterator[EngineSlice]:
    """Yield slices as `checkpoint_slices`, under vLLM's names."""
    modules = [(path.removesuffix(".base_layer"), module) for path, module in model.named_modules()]
    embedding = next((path for path, module in modules if type(module) is VocabParallelEmbedding), "model.embed_tokens")
    for path, module in modules:
        if adapter_places(module):
            yield from _adapter(path, module, model)
        if isinstance(module, LAYER):
            experts = path.removesuffix(CHILD)
            yield from _experts(experts, module, stacked=_published(model, f"{experts}.down_proj") in carried)
        elif isinstance(module, VocabParallelEmbedding):
            tied = isinstance(module, ParallelLMHead) and _published(model, f"{path}.weight") not in carried
            begin, end = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
            for holder, tensor in _weights(path, module):
                yield slice_of(f"{embedding if tied else path}.weight", holder, tensor[: end - begin], begin=begin)
        elif isinstance(module, LinearBase):
            yield from _linear(path, module, model)
            for name, tensor in module._parameters.items():
                if name not in ("weight", "bias") and _published(model, f"{path}.{name}") in carried:
                    yield slice_of(f"{path}.{name}", f"{path}.{name}", tensor)  # a router's score bias
        else:
            yield from _others(path, module)


def _weights(path: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    if module.weight.numel():
        yield f"{path}.weight", module.weight
    for packed in packed_linears(module):
        yield f"{path}.{packed.holder}", packed.read()


def _linear(path: str, module: LinearBase, model: nn.Module) -> Iterator[EngineSlice]:
    parts = _parts(path, module, model)
    dim = 1 if isinstance(module, RowParallelLinear) else 0  # so its bias, which has one dim, is whole
    tensors = []
    if _rounded(module.weight):
        for part in parts:
            yield slice_of(f"{part.name}.weight", f"{path}.weight", module.weight, quantized=True)
    else:
        tensors += [(holder, tensor, "weight") for holder, tensor in _weights(path, module)]
    if getattr(module, "bias", None) is not None:
        tensors.append((f"{path}.bias", module.bias, "bias"))
    for holder, tensor, leaf in tensors:
        pieces = [tensor] if len(parts) == 1 else tensor.split([part.size for part in parts])
        for part, piece in zip(parts, pieces, strict=True):
            yield slice_of(f"{part.name}.{leaf}", holder, piece, dim, part.begin)


def _parts(path: str, module: LinearBase, model: nn.Module) -> list[Part]:
    parent, _, leaf = path.rpartition(".")
    rank = module.tp_rank
    names = [f"{parent}.{name}" for name in getattr(model, "packed_modules_mapping", {}).get(leaf, ())]
    merged = _merged(path, module, model)
    if isinstance(module, QKVParallelLinear):
        group = rank // module.num_kv_head_replicas
        query, key = module.num_heads * module.head_size, module.num_kv_heads * module.head_size
        value = module.num_kv_heads * module.v_head_size
        spans = [(query, rank * query), (key, group * key), (value, group * value)]
    elif merged:
        sizes, starts = [size // module.tp_size for size in merged], [0] * len(merged)
        if leaf in _RUNS:
            first, *others = names or [path]
            runs = len(merged) - len(others)
            names = [*[first] * runs, *others]
            starts[:runs] = accumulate(merged[: runs - 1], initial=0)
        spans = [(size, start + rank * size) for size, start in zip(sizes, starts, strict=True)]
    elif isinstance(module, ColumnParallelLinear):
        names, spans = [path], [(module.output_size_per_partition, rank * module.output_size_per_partition)]
    elif isinstance(module, RowParallelLinear):
        names, spans = [path], [(module.input_size_per_partition, rank * module.input_size_per_partition)]
    else:
        names, spans = [path], [(module.output_size, 0)]
    if len(names) != len(spans):
        raise ContractError(f"`{path}` fuses {len(spans)} checkpoint tensors whose names vLLM does not list")
    return [Part(name, *span) for name, span in zip(names, spans, strict=True)]


def _merged(path: str, module: LinearBase, model: nn.Module) -> list[int]:
    """Rows of each linear that was merged into one, on all ranks: empty where none was."""
    mixer = model.get_submodule(path.rpartition(".")[0])
    if path.endswith(".conv1d") and hasattr(mixer, "key_dim"):  # a gated delta net's, which does not tell its sizes
        return [mixer.key_dim, mixer.key_dim, mixer.value_dim]
    return module.output_sizes if isinstance(module, MergedColumnParallelLinear) else []


def _adapter(path: str, module: nn.Module, model: nn.Module) -> Iterator[EngineSlice]:
    """Yield the first slot's adapter, part by part of a fused layer; vLLM stores B times the adapter's scaling.

    A is cut where the layer cuts its inputs and B where it cuts its outputs; the other is whole on every rank.
    """
    base = module.base_layer
    if not isinstance(base, LinearBase):
        return  # embeddings and logits have adapter memory too, which adapters of linears leave empty
    cut = int(isinstance(base, RowParallelLinear))
    for part, *stacks in zip(_parts(path, base, model), module.lora_b_stacked, module.lora_a_stacked, strict=True):
        for dim, (matrix, stack) in enumerate(zip(("lora_B", "lora_A"), stacks, strict=True)):
            begin = part.begin if dim == cut else 0
            yield slice_of(f"{part.name}.{matrix}.weight", f"{path}.{matrix}", stack[0, 0], dim, begin)


def _experts(path: str, module: nn.Module, *, stacked: bool) -> Iterator[EngineSlice]:
    """Yield the experts, by default each a tensor of its own; stacked, [experts, 2*width, hidden] is one tensor."""
    places = range(module.global_num_experts) if module.expert_map is None else module.expert_map.tolist()
    firsts = ("gate_proj", "up_proj") if module.moe_config.is_act_and_mul else ("up_proj",)
    rounded = _rounded(module.w13_weight)
    copies, parallel = list(_expert_weights(path, module)), module.moe_config.moe_parallel_config
    for expert, place in enumerate(places):
        for (first, fc1), (second, fc2) in copies:
            rows = zip(firsts, fc1[place].chunk(len(firsts)), strict=True)
            pieces = [(leaf, first, fc1, piece, 0) for leaf, piece in rows]
            for leaf, holder, whole, piece, dim in [*pieces, ("down_proj", second, fc2, fc2[place], 1)]:
                name, begin = f"{path}.{expert}.{leaf}.weight", parallel.tp_rank * piece.shape[dim]
                held = piece if place >= 0 else piece.narrow(dim, 0, 0)  # another rank's expert: no element of it
                if stacked:
                    name = f"{path}.{leaf if dim else 'gate_up_proj'}"
                    begin += parallel.tp_size * piece.shape[0] * (leaf == "up_proj")
                    part = slice_of(name, holder, held[None], dim + 1, begin)
                    yield replace(part, box=((expert, expert + 1), *part.box[1:]), quantized=rounded)
                else:
                    yield slice_of(name, holder, whole if rounded else held, dim, begin, quantized=rounded)


def _expert_weights(
    path: str, module: nn.Module
) -> Iterator[tuple[tuple[str, torch.Tensor], tuple[str, torch.Tensor]]]:
    """Yield ((holder, [experts, 2*width, hidden]), (holder, [experts, hidden, width])) of each copy of the experts."""
    if module.w13_weight.numel():
        plain = _rounded(module.w13_weight)
        yield tuple(
            (f"{path}.{name}", weight if plain else unpack_experts(module, weight))
            for name, weight in (("w13_weight", module.w13_weight), ("w2_weight", module.w2_weight))
        )
    if packed := [item.read() for item in packed_linears(module)]:
        half = len(packed) // 2
        yield (
            (f"{path}.gate_up_linear", torch.stack(packed[:half])),
            (f"{path}.down_linear", torch.stack(packed[half:])),
        )


def _rounded(weight: torch.Tensor) -> bool:
    return weight.dtype.itemsize == 1


def _others(path: str, module: nn.Module) -> Iterator[EngineSlice]:
    """Yield the own parameters of any other module: whole, but a run of rows in a mixer with a convolution.

    vLLM keeps ``-exp(A_log)`` of a state-space mixer, whose bits differ from those sent; only the comparison with a
    cold engine covers it.
    """
    kind, rank = type(module).__name__, 0
    if kind == "Mixer2RMSNormGated" or hasattr(module, "conv1d"):
        rank = getattr(module, "conv1d", module).tp_rank
    for name, tensor in module._parameters.items():
        if tensor is None:
            continue
        if kind == "MambaMixer2" and name == "A":
            yield slice_of(f"{path}.A_log", f"{path}.A", tensor, quantized=True)
        else:
            begin = rank * tensor.shape[0] if rank else 0
            yield slice_of(f"{path}.{name}", f"{path}.{name}", tensor, begin=begin)
