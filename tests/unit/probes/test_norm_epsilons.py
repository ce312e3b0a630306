"""Epsilons of norms that the probe of a trainer's settings finds in its modules."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import nn

from verifier.stages.load.probe_configs_megatron import norm_epsilons


class Norm(nn.Module):
    """A norm with a scale, as Transformer Engine keeps its epsilon."""

    def __init__(self, eps: float, *, scaled: bool = True) -> None:
        super().__init__()
        self.eps = eps
        if scaled:
            self.weight = nn.Parameter(torch.ones(2))


class Fused(nn.Module):
    """A reference linear with a norm before it, which reads the config's epsilon."""

    def __init__(self, eps: float) -> None:
        super().__init__()
        self.config = SimpleNamespace(layernorm_epsilon=eps)
        self.layer_norm_weight, self.weight = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, 2))


def chunk(*layers: nn.Module) -> nn.Module:
    decoder = nn.Module()
    decoder.layers, decoder.final_layernorm = nn.ModuleList(layers), Norm(1e-6)
    model, wrapped = nn.Module(), nn.Module()
    model.decoder, model.vision_model = decoder, Norm(1e-3)
    wrapped.module = model
    return wrapped


def test_norms_of_all_layers_have_one_row_with_every_epsilon():
    layers = [nn.ModuleDict({"norm": Norm(eps), "fc": Fused(1e-6)}) for eps in (1e-6, 1e-5)]
    last = nn.ModuleDict({"norm": Norm(1e-4), "free": Norm(1e-2, scaled=False)})
    assert norm_epsilons([chunk(*layers), chunk(last)]) == {
        "decoder.layers.*.norm": [1e-6, 1e-5, 1e-4], "decoder.layers.*.fc": [1e-6], "decoder.final_layernorm": [1e-6],
    }  # fmt: skip


class Adapted(nn.Module):
    """A linear with an adapter, as megatron-bridge wraps one: its weight is a merge, which is a collective."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.to_wrap = linear

    @property
    def weight(self) -> torch.Tensor:
        raise AssertionError("the weights of an adapter were merged, which no rank may do alone")


def test_adapters_are_not_merged():
    layer = nn.ModuleDict({"fc": Adapted(Fused(1e-6))})
    assert norm_epsilons([chunk(layer)])["decoder.layers.*.fc.to_wrap"] == [1e-6]
