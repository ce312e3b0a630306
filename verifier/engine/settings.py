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
    """Yield (path, attribute -> value as text) of each module of transformers or vLLM with numbers, flags or names.

    Objects that compute for a module are read with it, one level deep; the model's configuration is read once, because
    modules of transformers read it in their forward. The model's path is empty. A module's list of names of which no
    two are the same is sorted: transformers makes such lists from sets, whose order is another in every process.
    """
    for path, module in model.named_modules():
        members = {name: _sorted(value) for name, value in vars(module).items() if name not in _MACHINERY}
        found = _plain("", members)
        for name, value in members.items():
            if _computes(value):
                found |= _plain(f"{name}.", vars(value))
        config = members.get("config")
        if module is model and hasattr(config, "to_dict"):
            found |= _plain("config.", {key: value for key, value in vars(config).items() if not key.startswith("_")})
        if found:
            yield path, found


def _sorted(value: object) -> object:
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        return value
    return sorted(value) if len(set(value)) == len(value) else value


def _computes(value: object) -> bool:
    own = not isinstance(value, type | nn.Module | torch.Tensor | enum.Enum) and hasattr(value, "__dict__")
    return own and type(value).__module__.startswith(_HOLDERS)


def _plain(prefix: str, members: Mapping[str, Any]) -> dict[str, str]:
    # The first forward may replace None by an object, and vLLM replaces -1 by a size.
    texts = {prefix + name: _text(value) for name, value in members.items() if value is not None}
    return {name: text for name, text in texts.items() if text is not None and text != "-1"}


def _text(value: object) -> str | None:
    if isinstance(value, dict):
        value = [item for pair in sorted(value.items(), key=str) for item in pair]
    if isinstance(value, list | tuple):
        parts = [_text(item) for item in value]
        return None if None in parts else f"[{', '.join(map(str, parts))}]"
    is_plain = value is None or isinstance(value, bool | int | float | str | torch.dtype | enum.Enum)
    return str(value) if is_plain else None


def read_settings(worker: Any) -> list[tuple[str, dict[str, str]]]:
    """Return `settings_of` the model of one engine rank, vLLM's worker or `HfEngine`; called through `Engine.call`."""
    runner = getattr(worker, "model_runner", None)
    return list(settings_of(worker.model if runner is None else runner.get_model()))
