"""Which plain values of a model are read, and that each change of one shows."""

from __future__ import annotations

import enum

import torch
from torch import nn

from verifier.engine.settings import settings_of


class Style(enum.Enum):
    NEOX = "neox"


class Backend:
    """As vLLM's attention backends: an object that is no module, with numbers of its own."""

    def __init__(self) -> None:
        self.scale = 0.25
        self.sliding_window = (-1, -1)
        self.table = torch.zeros(2)


Backend.__module__ = "vllm.v1.attention.backends.made_up"


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.variance_epsilon = 1e-6
        self.style = Style.NEOX


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = Norm()
        self.impl = Backend()
        self.elsewhere = object()
        self.asked_for_later = -1
        self.factors = {"long": [1.0, 2.0]}


def test_numbers_flags_and_names_are_read_one_level_deep() -> None:
    found = dict(settings_of(Attention()))
    assert found["norm"]["variance_epsilon"] == "1e-06"
    assert found["norm"]["style"] == "Style.NEOX"
    assert found["norm"]["training"] == "True"
    assert found[""]["impl.scale"] == "0.25"
    assert found[""]["impl.sliding_window"] == "[-1, -1]"
    assert found[""]["factors"] == "[long, [1.0, 2.0]]"
    assert not [name for name in found[""] if name.startswith("elsewhere") or name == "impl.table"]
    assert "weight" not in found["norm"]
    assert "asked_for_later" not in found[""]


def test_a_float_is_shown_to_its_last_bit() -> None:
    """A scale that is one unit in the last place off is another text."""
    model = Attention()
    before = dict(settings_of(model))[""]["impl.scale"]
    model.impl.scale = 0.25000000000000006
    assert dict(settings_of(model))[""]["impl.scale"] != before


def test_where_a_model_was_read_is_no_setting() -> None:
    """A cold engine reads the export, and the synced one read the source."""
    model = Norm()
    model.name_or_path = "/somewhere"
    assert "name_or_path" not in dict(settings_of(model))[""]


def test_names_in_the_order_of_a_set_are_sorted_and_others_are_not() -> None:
    """transformers keeps `layer_types` as a list of a set; the kinds of layers by their number have an order."""
    model = Norm()
    model.layer_types = ["sliding_attention", "full_attention"]
    model.kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model.sizes = [2, 1]
    found = dict(settings_of(model))[""]
    assert found["layer_types"] == "[full_attention, sliding_attention]"
    assert found["kinds"] == "[sliding_attention, full_attention, sliding_attention]"
    assert found["sizes"] == "[2, 1]"
