"""Mapping of a vLLM rank's tensors back to checkpoint names, independent of vLLM's weight loaders."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import replace

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe import FusedMoE
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from verifier.engine.api import Box
from verifier.engine.stored_tensors import CheckpointSlice, adapter_places, whole_slice
from verifier.engine.vllm.packed_vllm import packed_linears, unpack_experts
from verifier.engine.vllm.view_hybrid_vllm import (
    FusedPart,
    is_mixer,
    is_mixer_norm,
    mixer_slices,
    published_name,
    runs,
)
from verifier.errors import ContractError


def checkpoint_slices(model: nn.Module, carried: Collection[str]) -> Iterator[CheckpointSlice]:
    """Yield this rank's part of every checkpoint tensor, once per tensor that holds it.

    Args:
        model: vLLM's model.
        carried: names in the checkpoint; they decide whether a head is its own tensor or tied to the embedding.

    Raises:
        ContractError: the parts of a fused layer have no known checkpoint names, or a packed expert weight cannot be
            read back.
    """
    for part in _slices(model, carried):
        yield replace(part, name=published_name(model, part.name))


def _slices(model: nn.Module, carried: Collection[str]) -> Iterator[CheckpointSlice]:
    """Yield slices as `checkpoint_slices`, under vLLM's names."""
    modules = [(path.removesuffix(".base_layer"), module) for path, module in model.named_modules()]
    embedding = next((path for path, module in modules if type(module) is VocabParallelEmbedding), "model.embed_tokens")
    for path, module in modules:
        if adapter_places(module):
            yield from _adapter(path, module, model)
        if isinstance(module, FusedMoE):
            yield from _experts(path, module)
        elif isinstance(module, VocabParallelEmbedding):
            tied = isinstance(module, ParallelLMHead) and f"{path}.weight" not in carried
            yield from _vocabulary(path, embedding if tied else path, module)
        elif isinstance(module, LinearBase):
            yield from _linear(path, module, model)
            for name, tensor in module._parameters.items():
                published = published_name(model, f"{path}.{name}")
                if name not in ("weight", "bias") and published in carried:  # a router's score bias
                    yield whole_slice(f"{path}.{name}", f"{path}.{name}", tensor)
        elif is_mixer(module) or is_mixer_norm(module):
            yield from mixer_slices(path, module)
        else:
            for name, tensor in module._parameters.items():
                if tensor is not None:
                    yield whole_slice(f"{path}.{name}", f"{path}.{name}", tensor)


def _weights(path: str, module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (holder, tensor) of every copy of a linear's weight."""
    if module.weight.numel():
        yield f"{path}.weight", module.weight
    for packed in packed_linears(module):
        yield f"{path}.{packed.holder}", packed.read()


def _linear(path: str, module: LinearBase, model: nn.Module) -> Iterator[CheckpointSlice]:
    bias = getattr(module, "bias", None)
    rounded = _rounded(module.weight)
    if isinstance(module, ColumnParallelLinear):
        parts = _parts(path, module, model)
        sources = [] if rounded else [(holder, tensor, "weight") for holder, tensor in _weights(path, module)]
        if rounded:
            yield from (_quantized(f"{part.name}.weight", f"{path}.weight", module.weight) for part in parts)
        if bias is not None:
            sources.append((f"{path}.bias", bias, "bias"))
        for holder, tensor, leaf in sources:
            at = 0
            for part in parts:
                rows = tensor[at : at + part.rows]
                box = ((part.begin, part.begin + part.rows), *((0, size) for size in tensor.shape[1:]))
                yield CheckpointSlice(name=f"{part.name}.{leaf}", holder=holder, box=box, tensor=rows)
                at += part.rows
        return
    begin = module.tp_rank * module.input_size_per_partition if isinstance(module, RowParallelLinear) else 0
    if rounded:
        yield _quantized(f"{path}.weight", f"{path}.weight", module.weight)
    for holder, tensor in () if rounded else _weights(path, module):
        box = ((0, tensor.shape[0]), (begin, begin + tensor.shape[1]))
        yield CheckpointSlice(name=f"{path}.weight", holder=holder, box=box, tensor=tensor)
    if bias is not None:
        yield whole_slice(f"{path}.bias", f"{path}.bias", bias)


def _parts(path: str, module: ColumnParallelLinear, model: nn.Module) -> list[FusedPart]:
    parent, _, leaf = path.rpartition(".")
    fused = getattr(model, "packed_modules_mapping", {}).get(leaf)
    rank = module.tp_rank
    if isinstance(module, QKVParallelLinear):
        query = module.num_heads * module.head_size
        key = module.num_kv_heads * module.head_size
        value = module.num_kv_heads * module.v_head_size
        group = rank // module.num_kv_head_replicas
        spans = [(query, rank * query), (key, group * key), (value, group * value)]
    elif isinstance(module, MergedColumnParallelLinear):
        if of_one := runs(path, module):
            return of_one
        sizes = [size // module.tp_size for size in module.output_sizes]
        spans = [(size, rank * size) for size in sizes]
    else:
        rows = module.output_size_per_partition
        return [FusedPart(name=path, rows=rows, begin=rank * rows)]
    if fused is None or len(fused) != len(spans):
        raise ContractError(f"`{path}` fuses {len(spans)} checkpoint tensors whose names vLLM does not list")
    return [
        FusedPart(name=f"{parent}.{name}", rows=rows, begin=begin)
        for name, (rows, begin) in zip(fused, spans, strict=True)
    ]


def _adapter(path: str, module: nn.Module, model: nn.Module) -> Iterator[CheckpointSlice]:
    """Yield the first slot's adapter, part by part of a fused layer; vLLM stores B times the adapter's scaling."""
    if not isinstance(module.base_layer, LinearBase):
        return  # embeddings and logits have adapter memory too, which adapters of linears leave empty
    parent, _, leaf = path.rpartition(".")
    names = getattr(model, "packed_modules_mapping", {}).get(leaf, [leaf])
    for matrix, stacks in (("lora_A", module.lora_a_stacked), ("lora_B", module.lora_b_stacked)):
        for name, stack in zip(names, stacks, strict=True):
            yield whole_slice(f"{parent}.{name}.{matrix}.weight", f"{path}.{matrix}", stack[0, 0])


def _vocabulary(path: str, canonical: str, module: VocabParallelEmbedding) -> Iterator[CheckpointSlice]:
    begin, end = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
    for holder, tensor in _weights(path, module):
        rows = tensor[: end - begin]
        yield CheckpointSlice(
            name=f"{canonical}.weight", holder=holder, box=((begin, end), (0, tensor.shape[1])), tensor=rows
        )


def _experts(path: str, module: FusedMoE) -> Iterator[CheckpointSlice]:
    places = range(module.global_num_experts) if module.expert_map is None else module.expert_map.tolist()
    firsts = ("gate_proj", "up_proj") if module.moe_config.is_act_and_mul else ("up_proj",)
    if _rounded(module.w13_weight):
        for expert in (expert for expert, place in enumerate(places) if place >= 0):
            for leaf, holder in (*((leaf, "w13_weight") for leaf in firsts), ("down_proj", "w2_weight")):
                yield _quantized(f"{path}.{expert}.{leaf}.weight", f"{path}.{holder}", getattr(module, holder))
        return
    copies = list(_expert_weights(path, module))
    for expert, place in enumerate(places):
        if place < 0:
            continue
        for holder, fc1, fc2 in copies:
            width = fc1.shape[1] // len(firsts)
            begin = module.tp_rank * width
            rows: Box = ((begin, begin + width), (0, fc1.shape[2]))
            cols: Box = ((0, fc2.shape[1]), (begin, begin + width))
            prefix, first, second = f"{path}.{expert}", *holder
            for leaf, tensor in zip(firsts, fc1[place].split(width), strict=True):
                yield CheckpointSlice(name=f"{prefix}.{leaf}.weight", holder=first, box=rows, tensor=tensor)
            yield CheckpointSlice(name=f"{prefix}.down_proj.weight", holder=second, box=cols, tensor=fc2[place])


def _expert_weights(path: str, module: FusedMoE) -> Iterator[tuple[tuple[str, str], torch.Tensor, torch.Tensor]]:
    """Yield ((holders), [experts, 2*width, hidden], [experts, hidden, width]) of every copy of the experts."""
    if module.w13_weight.numel():
        yield (
            (f"{path}.w13_weight", f"{path}.w2_weight"),
            unpack_experts(module, module.w13_weight),
            unpack_experts(module, module.w2_weight),
        )
    packed = list(packed_linears(module))
    if packed:
        half = len(packed) // 2
        yield (
            (f"{path}.gate_up_linear", f"{path}.down_linear"),
            torch.stack([item.read() for item in packed[:half]]),
            torch.stack([item.read() for item in packed[half:]]),
        )


def _rounded(weight: torch.Tensor) -> bool:
    return weight.dtype.itemsize == 1


def _quantized(name: str, holder: str, tensor: torch.Tensor) -> CheckpointSlice:
    return CheckpointSlice(name=name, holder=holder, box=(), tensor=tensor, quantized=True)
