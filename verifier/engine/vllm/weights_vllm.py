"""What a vLLM rank computes with, stored tensors and packed linears: to compare with a cold engine, and to poison."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import torch
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from verifier.engine.vllm.packed_vllm import packed_linears, poison_packed
from verifier.engine.weights import Held, memory_of_parameters, poison_stored, prefixed_modules, stored, with_views


def held_tensors(model: nn.Module) -> Iterator[Held]:
    """Every stored tensor of the model, and every packed linear as the weight that it multiplies by.

    Parameters that vLLM emptied after packing are yielded too, with their shape of zero elements. A parameter that was
    not there before the weights were loaded, such as a quantised weight's scale, is derived: no checkpoint names it.
    """
    places = memory_of_parameters(model)
    for prefix, module in prefixed_modules(model):
        loadable = get_layerwise_info(module).restore_metadata[0].keys() | SKIP_TENSORS
        for held in with_views(stored(prefix, module), places):
            made_later = held.kind == "parameter" and held.name.removeprefix(prefix) not in loadable
            yield dataclasses.replace(held, kind="derived") if made_later else held
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
    places = memory_of_parameters(model)
    for prefix, module in prefixed_modules(model):
        for held in with_views(stored(prefix, module), places):
            yield held.name, poison_stored(held, carried, aside)
        for holder, how in poison_packed(module):
            yield prefix + holder, how
