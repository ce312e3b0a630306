"""Contracts of vLLM's reload with a buffer that is filled anew: views that it keeps, and copies that the worker makes.

CUDA IPC lets the engine read the trainer's own buffer. A module of three parameters gets one in each of three chunks,
all out of one buffer.
"""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.model_loader.reload import layerwise
from vllm.model_executor.model_loader.weight_utils import default_weight_loader

from verifier.engine.vllm.worker_vllm import copy_kept_views

NAMES = ("first", "second", "third")
SIZE = 64


class Layer(nn.Module):
    """Complete only with the last chunk; its second tensor is loaded by halves."""

    def __init__(self) -> None:
        super().__init__()
        for name in NAMES:
            self.register_parameter(name, nn.Parameter(torch.zeros(SIZE), requires_grad=False))


def by_halves(param: nn.Parameter, loaded: torch.Tensor, half: int) -> None:
    """Load a part of what is given, as a fused parameter's loader does."""
    param.data[half * SIZE // 2 :][: SIZE // 2].copy_(loaded)


def users(buffer: torch.Tensor) -> int:
    """Tensors that lie in a buffer, itself among them."""
    return torch._C._storage_Use_Count(buffer.untyped_storage()._cdata)


def reloaded(release: bool) -> tuple[list[int], list[bool]]:
    """Tensors that lie in the buffer after each chunk, beside the buffer itself; which parameters came out right."""
    layer = Layer()
    layer.second.weight_loader = by_halves
    layerwise.record_metadata_for_reloading(layer)
    layerwise.initialize_layerwise_reload(layer)
    parameters = dict(layer.named_parameters())
    buffer = torch.empty(SIZE)
    held, sent = [], {}
    for name in NAMES:
        buffer.copy_(torch.randn(SIZE))
        sent[name] = buffer.clone()
        before = users(buffer)
        if name == "second":
            for half in (0, 1):
                parameters[name].weight_loader(parameters[name], buffer[half * SIZE // 2 :][: SIZE // 2], half)
        else:
            getattr(parameters[name], "weight_loader", default_weight_loader)(parameters[name], buffer[:])
        if release:
            copy_kept_views(buffer)
        held.append(users(buffer) - before)
    layerwise.finalize_layerwise_reload(layer, None)
    return held, [torch.equal(layer.get_parameter(name), tensor) for name, tensor in sent.items()]


def views_are_kept_until_the_layer_is_complete() -> None:
    """Why `copy_kept_views` is called; when this fails, vLLM copies by itself."""
    assert reloaded(release=False) == ([1, 2, -3], [False, False, True])


def what_was_let_go_is_loaded_right() -> None:
    """The copies are what the layer is completed with."""
    assert reloaded(release=True) == ([0, 0, 0], [True, True, True])
