"""Checkpoint parts in the state-space layers of a hybrid model on a vLLM rank, and hybrids' checkpoint names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from torch import nn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from verifier.engine.stored_tensors import CheckpointSlice

_SPELLINGS = {"NemotronHForCausalLM": (("model.embed_tokens.", "backbone.embeddings."), ("model.", "backbone."))}
"""Model class -> (prefix of vLLM's names, prefix in checkpoints); the first match counts."""
_RUNS = ("in_proj", "conv1d")
"""Last names of the linears whose rows are runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedPart:
    """Run of rows of a fused weight that belongs to one checkpoint tensor."""

    name: str
    """Checkpoint tensor without ``.weight``."""
    rows: int
    """Number of rows on this rank."""
    begin: int
    """First row in the checkpoint tensor."""


def published_name(model: nn.Module, name: str) -> str:
    """Return the checkpoint's name of one of vLLM's names."""
    for ours, published in _SPELLINGS.get(type(model).__name__, ()):
        if name.startswith(ours):
            return published + name.removeprefix(ours)
    return name


def runs(path: str, module: MergedColumnParallelLinear) -> list[FusedPart]:
    """Return the parts of a linear whose runs of rows (z, x, B, C, dt) are one checkpoint tensor; empty for others."""
    if path.rpartition(".")[2] not in _RUNS:
        return []
    sizes = [size // module.tp_size for size in module.output_sizes]
    begins = [0, *accumulate(module.output_sizes)]
    return [
        FusedPart(name=path, rows=size, begin=begin + module.tp_rank * size)
        for begin, size in zip(begins, sizes, strict=False)
    ]


def mixer_slices(path: str, module: nn.Module) -> Iterator[CheckpointSlice]:
    """Yield the own parameters of a state-space mixer or its norm: a run of rows per rank.

    vLLM keeps ``-exp(A_log)``, whose bits differ from those sent; only the comparison with a cold engine covers it.
    """
    rank = module.conv1d.tp_rank if is_mixer(module) else module.tp_rank
    for name, tensor in module._parameters.items():
        if name == "A":
            yield CheckpointSlice(name=f"{path}.A_log", holder=f"{path}.A", box=(), tensor=tensor, quantized=True)
        elif tensor is not None:
            rows = tensor.shape[0]
            box = ((rank * rows, (rank + 1) * rows),)
            yield CheckpointSlice(name=f"{path}.{name}", holder=f"{path}.{name}", box=box, tensor=tensor)


def is_mixer(module: nn.Module) -> bool:
    """Return whether a module is a Mamba2 mixer, by name: its class cannot be imported without Triton."""
    return type(module).__name__ == "MambaMixer2"


def is_mixer_norm(module: nn.Module) -> bool:
    """Return whether a module is the gated norm of a Mamba2 mixer, which is divided like the mixer's heads."""
    return type(module).__name__ == "Mixer2RMSNormGated"
