"""Plain values that a model's forward reads beside its tensors: epsilons, scales, windows, flags."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

_HOLDERS = ("vllm.model_executor.", "vllm.v1.attention.")
"""Module prefixes of classes that compute for a layer: attention backends, routers, quantisation."""

_MACHINERY = frozenset(vars(nn.Module())) - {"training"} | {"name_or_path"}
"""Attributes of every module that torch uses for members and hooks, and the model's path in transformers."""


def settings_of(model: nn.Module) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield the numbers, flags and names of each module and of the objects that compute for it, one level deep.

    The model's configuration is read once, from the model, because modules of transformers read it in their forward.

    Args:
        model: model of transformers or vLLM.

    Yields:
        (path of the module, attribute -> value as text); the model's path is empty. Modules without settings are left
        out.
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
        # The first forward may replace None by an object, and vLLM replaces -1 by a size.
        text = None if value is None else _text(value)
        if text is not None and text != "-1":
            yield prefix + name, text


def _text(value: object) -> str | None:
    """Return a plain value as text; None for any other value."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | enum.Enum):
        return str(value)
    if isinstance(value, list | tuple):
        parts = [_text(item) for item in value]
        return None if None in parts else f"[{', '.join(part for part in parts if part is not None)}]"
    if isinstance(value, dict):
        return _text([item for pair in sorted(value.items(), key=str) for item in pair])
    return None


def read_settings(worker: Any) -> list[tuple[str, dict[str, str]]]:
    """Return `settings_of` the model of one engine rank; called through `Engine.call`.

    Args:
        worker: vLLM's worker or `HfEngine`.
    """
    runner = getattr(worker, "model_runner", None)
    return list(settings_of(worker.model if runner is None else runner.get_model()))
