"""Stored tensors and packed linears of a vLLM rank: listing and poisoning."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator

import torch
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_TENSORS

from verifier.engine.api import Poisoned
from verifier.engine.stored_tensors import (
    StoredTensor,
    parameter_storages,
    poison_stored,
    prefixed_modules,
    stored_in_module,
    with_views,
)
from verifier.engine.vllm.packed_vllm import packed_linears, poison_packed


def model_tensors(model: nn.Module) -> Iterator[StoredTensor]:
    """Yield every stored tensor of the model, and every packed linear as the weight that it multiplies by.

    Parameters that vLLM emptied after packing are yielded with zero elements. A parameter that did not exist before the
    weights were loaded, such as a quantised weight's scale, is derived: no checkpoint has it.
    """
    storages = parameter_storages(model)
    for prefix, module in prefixed_modules(model):
        loadable = get_layerwise_info(module).restore_metadata[0].keys() | SKIP_TENSORS
        for item in with_views(stored_in_module(prefix, module), storages):
            made_later = item.kind == "parameter" and item.name.removeprefix(prefix) not in loadable
            yield dataclasses.replace(item, kind="derived") if made_later else item
        for packed in packed_linears(module):
            yield StoredTensor(name=prefix + packed.holder, kind="derived", tensor=packed.read())


def poison_model(model: nn.Module, carried: Collection[str], saved: dict[str, torch.Tensor]) -> Iterator[Poisoned]:
    """Fill with NaN everything that a forward pass reads.

    Args:
        model: vLLM's model.
        carried: names that a checkpoint carries.
        saved: receives the contents of tensors that no checkpoint carries.
    """
    storages = parameter_storages(model)
    for prefix, module in prefixed_modules(model):
        for item in with_views(stored_in_module(prefix, module), storages):
            yield Poisoned(name=item.name, how=poison_stored(item, carried, saved))
        for holder, how in poison_packed(module):
            yield Poisoned(name=prefix + holder, how=how)
