"""Points of a model at which trainer and transformers hold the same values, by kind of module."""

from __future__ import annotations

from pathlib import Path

import msgspec


class ModulePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One point within a layer, or, without a layer, of the whole model."""

    name: str
    """Megatron's name of the module within its layer, or of what happens there where no module has it."""
    elsewhere: str | None = None
    """Attribute path of the module in Megatron, where it is not the name."""
    side: str = "output"
    """"output", or "input" with the number of the argument."""
    argument: int = 0
    columns: str = "whole"
    """Cut of the columns over tensor-parallel ranks: "whole", none; "split", equal slices; "keys", the same, or one
    key-value head that several ranks have; "qkv", "gated", "mixer", slices within each part of a merged linear."""
    needs: str = ""
    """End of the module's class name, where modules of other classes only pass on what they get."""
    theirs: tuple[str, ...]
    """transformers' modules, whose values are put beside one another: paths from "layer", "attention", "mlp", "mamba",
    "delta" or "model", with "<" behind where the value is the module's input; "attention:query" and "attention:key" are
    what attention gets, "experts:gates" the weight of each expert."""

    @property
    def module(self) -> str:
        """Attribute path of the module in Megatron."""
        return self.name if self.elsewhere is None else self.elsewhere


_TABLE = msgspec.yaml.decode(
    Path(__file__).with_name("module_points.yaml").read_bytes(), type=dict[str, tuple[ModulePoint, ...]]
)
LAYER_POINTS, LAST_POINTS = _TABLE["layer"], _TABLE["last"]
"""Points of each layer, in the order of the data flow; and behind the layers."""
EMBEDDING = ModulePoint(name="embedding", theirs=("model.embed_tokens", "model.embeddings"))
OUTPUT_LAYER = "output_layer"
OF_THE_LOSS = ("logprob", "entropy")
"""Points behind the model: log-probability of each label and entropy of its distribution, nats."""
_NAMES = list(dict.fromkeys(point.name for point in LAYER_POINTS))
_LAST = list(dict.fromkeys(point.name for point in LAST_POINTS)) + list(OF_THE_LOSS)
_ROOM = 100
"""More than a layer has points."""


def order_of(point: str, num_layers: int) -> int:
    """Place of a point in the data flow, by its whole name; later points have greater ones."""
    if point == EMBEDDING.name:
        return 0
    if point in _LAST:
        return (num_layers + 1) * _ROOM + _LAST.index(point)
    _, layer, name = point.split(".", 2)
    return (int(layer) + 1) * _ROOM + _NAMES.index(name)
