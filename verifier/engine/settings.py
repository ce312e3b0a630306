"""The plain values that a model's forward reads beside its tensors: epsilons, scales, windows, flags."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_HOLDERS = ("vllm.model_executor.", "vllm.v1.attention.")
"""Modules of the classes whose objects compute on a layer's behalf: attention backends, routers, quantisation."""

_MACHINERY = frozenset(vars(nn.Module())) - {"training"} | {"name_or_path"}
"""Attributes of every module, by which torch keeps its members and hooks, and where transformers read the model."""


def settings_of(model: nn.Module) -> Iterator[tuple[str, dict[str, str]]]:
    """Per module its numbers, flags and names, and those of the objects that compute on its behalf, one level deep.

    A model's own configuration is read once, where the model keeps it: modules of transformers ask it in their forward.

    Args:
        model: transformers', or vLLM's.

    Yields:
        Path of the module, nothing for the model itself; attribute -> value, as text that differs if the value does.
        Modules without any are left out.
    """
    for path, module in model.named_modules():
        found = dict(_plain("", {name: value for name, value in vars(module).items() if name not in _MACHINERY}))
        for name, value in vars(module).items():
            if _computes(value):
                found |= _plain(f"{name}.", vars(value))
        config = vars(module).get("config")
        if module is model and hasattr(config, "to_dict"):
            public = {key: value for key, value in vars(config).items() if not key.startswith("_")}
            found |= _plain("config.", public)
        if found:
            yield path, found


def _computes(value: object) -> bool:
    kind = type(value)
    own = not isinstance(value, type | nn.Module | torch.Tensor | enum.Enum) and hasattr(value, "__dict__")
    return own and kind.__module__.startswith(_HOLDERS)


def _plain(prefix: str, members: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in members.items():
        # None may stand for an object that the first forward makes, and vLLM has -1 for a size that it then asks for.
        text = None if value is None else _text(value)
        if text is not None and text != "-1":
            yield prefix + name, text


def _text(value: object) -> str | None:
    """The value as text, or None of what is no plain value."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | enum.Enum):
        return str(value)
    if isinstance(value, list | tuple):
        parts = [_text(item) for item in value]
        return None if None in parts else f"[{', '.join(part for part in parts if part is not None)}]"
    if isinstance(value, dict):
        return _text([item for pair in sorted(value.items(), key=str) for item in pair])
    return None


def held_settings(worker: Any) -> list[tuple[str, dict[str, str]]]:
    """`settings_of` the model of one engine rank; called through `Engine.call`.

    Args:
        worker: vLLM's worker, or transformers' engine.
    """
    runner = getattr(worker, "model_runner", None)
    return list(settings_of(worker.model if runner is None else runner.get_model()))
