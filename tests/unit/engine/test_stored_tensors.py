"""What a model computes with, and its poison: 8-bit floats and the places of adapters too."""

from __future__ import annotations

import torch
from torch import nn

from verifier.engine.stored_tensors import (
    adapter_places,
    poison_stored,
    restore,
    stored_in_model,
)


class Quantized(nn.Module):
    """As an fp8 linear: a transposed 8-bit weight and its scale, and a buffer that no checkpoint carries."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 6).to(torch.float8_e4m3fn).t(), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.ones(()), requires_grad=False)
        self.register_buffer("table", torch.randn(3), persistent=False)


class Viewed(nn.Module):
    """As NemotronH's mixer: a buffer that is another module's parameter in another shape, and one of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1d = nn.Conv1d(4, 4, 2, bias=False)
        self.register_buffer("conv_weights", self.conv1d.weight.view(4, 8), persistent=False)
        self.register_buffer("table", torch.randn(3), persistent=False)


class Adapted(nn.Module):
    """As vLLM's LoRA layers, which keep tuples."""

    def __init__(self) -> None:
        super().__init__()
        self.lora_a_stacked = (torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 4))
        self.lora_b_stacked = (torch.zeros(1, 1, 6, 2), torch.zeros(1, 1, 3, 2))


def test_poison_reaches_8_bit_floats_and_restores_what_no_checkpoint_carries():
    model = Quantized()
    table, aside = model.table.clone(), {}
    done = [poison_stored(held, {"weight"}, aside) for held in stored_in_model(model)]
    assert {item.name: item.how for item in done} == {
        "weight": "nan",
        "weight_scale": "nan",
        "table": "nan, restored before the update",
    }
    assert model.weight.float().isnan().all()
    restore(model, aside)
    assert torch.equal(model.table, table)


def test_views_of_parameters_are_poisoned_with_them():
    """Put aside and brought back, a view would undo the poison of its parameter."""
    model, aside = Viewed(), {}
    held = list(stored_in_model(model))
    assert {item.name: item.kind for item in held} == {
        "conv_weights": "view", "table": "buffer", "conv1d.weight": "parameter"
    }  # fmt: skip
    assert {item.name: poison_stored(item, (), aside).how for item in held}["conv_weights"] == "nan"
    restore(model, aside)
    assert model.conv1d.weight.isnan().all()
    assert not model.table.isnan().any()


def test_places_of_adapters_are_held():
    model = Adapted()
    names = ["lora_a_stacked[0]", "lora_a_stacked[1]", "lora_b_stacked[0]", "lora_b_stacked[1]"]
    assert list(adapter_places(model)) == names
    assert [held.name for held in stored_in_model(nn.ModuleDict({"linear": model}))] == [
        f"linear.{name}" for name in names
    ]
    adapter_places(model)["lora_b_stacked[1]"].fill_(1)
    assert model.lora_b_stacked[1].all()


class Caching(nn.Module):
    """A layer with copies of its weight: in a tuple, in a dict, and on the parameter; and a list of the weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 3), requires_grad=False)
        self.kept = (self.weight.data_ptr(), self.weight.detach().clone())
        self.by_dtype = {torch.float64: self.weight.double()}
        self.weight.wide = self.weight.double()  # type: ignore[attr-defined]
        self.all = [self.weight]
        self.kv_cache = [torch.zeros(2)]


def test_copies_of_a_weight_that_a_layer_caches_are_held():
    model, saved = Caching(), {}
    held = list(stored_in_model(model))
    assert {item.name: item.kind for item in held} == {
        "weight": "parameter", "kept[1]": "derived", "by_dtype[torch.float64]": "derived", "weight.wide": "derived",
    }  # fmt: skip
    assert [poison_stored(item, ("weight",), saved).how for item in held] == ["nan"] + 3 * [
        "nan, restored before the update"
    ]
    restore(model, saved)
    assert model.weight.isnan().all()
    assert not model.kept[1].isnan().any()
