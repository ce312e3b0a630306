"""What a vLLM rank computes with, stored tensors and packed linears: to compare with a cold engine, and to poison."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import torch
from torch import nn

from verifier.engine.held import Held, poison_stored, prefixed_modules, stored
from verifier.engine.packed_vllm import packed_linears, poison_packed


def held_tensors(model: nn.Module) -> Iterator[Held]:
    """Every stored tensor of the model, and every packed linear as the weight that it multiplies by.

    Parameters that vLLM emptied after packing are yielded too, with their shape of zero elements.
    """
    for prefix, module in prefixed_modules(model):
        yield from stored(prefix, module)
        for packed in packed_linears(module):
            yield Held(name=prefix + packed.holder, kind="derived", tensor=packed.read())


def poison_model(
    model: nn.Module, carried: Collection[str], aside: dict[str, torch.Tensor]
) -> Iterator[tuple[str, str]]:
    """Fill with NaN everything that a forward pass reads.

    Args:
        model: vLLM's.
        carried: names that a checkpoint carries.
        aside: receives what the checkpoint does not carry.

    Yields:
        (name, what was done) of each tensor.
    """
    for prefix, module in prefixed_modules(model):
        for held in stored(prefix, module):
            yield held.name, poison_stored(held, carried, aside)
        for holder, how in poison_packed(module):
            yield prefix + holder, how
