"""What a vLLM rank holds of a hybrid model's state-space layers, and how hybrids' checkpoints spell vLLM's names."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from torch import nn
from vllm.model_executor.layers.linear import MergedColumnParallelLinear

from verifier.engine.view_slice import Part, Slice

_SPELLINGS = {"NemotronHForCausalLM": (("model.embed_tokens.", "backbone.embeddings."), ("model.", "backbone."))}
"""Model class -> prefix of vLLM's names and of the checkpoints', the first that fits."""
_RUNS = ("in_proj", "conv1d")


def published_name(model: nn.Module, name: str) -> str:
    """The checkpoint's spelling of one of vLLM's names."""
    for ours, published in _SPELLINGS.get(type(model).__name__, ()):
        if name.startswith(ours):
            return published + name.removeprefix(ours)
    return name


def runs(path: str, module: MergedColumnParallelLinear) -> list[Part]:
    """The parts of a linear whose runs of rows (z, x, B, C, dt) are one checkpoint tensor; none if it is no such."""
    if path.rpartition(".")[2] not in _RUNS:
        return []
    sizes = [size // module.tp_size for size in module.output_sizes]
    begins = [0, *accumulate(module.output_sizes)]
    return [
        Part(name=path, rows=size, begin=begin + module.tp_rank * size)
        for begin, size in zip(begins, sizes, strict=False)
    ]


def mixer_slices(path: str, module: nn.Module) -> Iterator[Slice]:
    """What a state-space mixer, or its norm, holds itself: a run of rows per rank.

    vLLM keeps ``-exp(A_log)``, whose bits are not what was sent; the comparison with a cold engine judges it.
    """
    rank = module.conv1d.tp_rank if is_mixer(module) else module.tp_rank
    for name, tensor in module._parameters.items():
        if name == "A":
            yield Slice(name=f"{path}.A_log", holder=f"{path}.A", box=(), tensor=tensor, quantized=True)
        elif tensor is not None:
            rows = tensor.shape[0]
            box = ((rank * rows, (rank + 1) * rows),)
            yield Slice(name=f"{path}.{name}", holder=f"{path}.{name}", box=box, tensor=tensor)


def is_mixer(module: nn.Module) -> bool:
    """A Mamba2 mixer; told by name, because its module cannot be imported without Triton."""
    return type(module).__name__ == "MambaMixer2"


def is_mixer_norm(module: nn.Module) -> bool:
    """The gated norm of a Mamba2 mixer, which is divided like the mixer's heads."""
    return type(module).__name__ == "Mixer2RMSNormGated"
