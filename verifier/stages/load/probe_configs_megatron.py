"""Probes of configurations: the source's and an export's config.json, and the provider that a trainer is built from."""

from __future__ import annotations

import enum
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from verifier.config_json import with_defaults
from verifier.core.record import Probe
from verifier.model.checkpoint import Checkpoint
from verifier.stages.export.records import ExportedConfig
from verifier.stages.load.records import SourceConfig, StatedConfig
from verifier.stages.logprob.records import LAYER_WINDOWS, NORM_EPSILONS, ROTARY_FREQUENCIES, ProviderFields


def record_config(probe: Probe, source: Checkpoint, folder: Path, version: int) -> None:
    """The config.json that megatron-bridge wrote with an export, and the source's, as transformers reads both."""
    for kind, path in ((SourceConfig, source.path), (ExportedConfig, folder)):
        probe.emit(kind(name="config.json", version=version, values=_texts(_read(path))))


def record_stated(probe: Probe, source: Checkpoint) -> None:
    """The source's config.json as it stands; for keys that it does not have, what transformers takes."""
    probe.emit(StatedConfig(name="config.json", values=_texts(with_defaults(source.config, _read(source.path)))))


def record_provider(probe: Probe, provider: Any, chunks: Sequence[nn.Module]) -> None:
    """The plain fields of the provider of a rank's model, windows of layers, epsilons of norms, rotary frequencies."""
    fields = {name: _plain(value) for name, value in vars(provider).items()}
    fields[LAYER_WINDOWS] = dict(window for chunk in chunks for window in _windows(chunk))
    fields[NORM_EPSILONS] = norm_epsilons(chunks)
    fields[ROTARY_FREQUENCIES] = dict(found for chunk in chunks for found in _frequencies(chunk))
    probe.emit(ProviderFields(name="provider", values=_texts({k: v for k, v in fields.items() if v is not ...})))


def _windows(chunk: nn.Module) -> Iterator[tuple[str, int | None]]:
    """Yield (number of a layer from 0 on, rows before its own that a row attends to; None for all).

    Transformer Engine, its reference functions and megatron-bridge's own attention keep them by two names.
    """
    for path, module in chunk.named_modules():
        attention = getattr(module, "core_attention", None)
        if attention is None or ".mtp." in f".{path}.":
            continue
        if hasattr(attention, "rows_before"):
            yield str(module.layer_number - 1), attention.rows_before
        elif hasattr(attention, "window_size"):
            before = -1 if attention.window_size is None else attention.window_size[0]
            yield str(module.layer_number - 1), None if before < 0 else int(before)


def _frequencies(chunk: nn.Module) -> Iterator[tuple[str, list[float]]]:
    """Yield (path, frequencies) of each module of the text model that has one set of them, as YaRN's have not."""
    for path, module in chunk.named_modules():
        name, found = path.replace("module.", ""), getattr(module, "inv_freq", None)
        plain = isinstance(found, torch.Tensor) and found.ndim == 1 and not hasattr(module, "inv_freq_inter")
        if plain and name.removeprefix("language_model.") == "rotary_pos_emb":
            yield name, found.tolist()


def norm_epsilons(chunks: Iterable[nn.Module]) -> dict[str, list[float]]:
    """Epsilons of the decoder's norms with scales, of their own or fused with a linear; see `NORM_EPSILONS`.

    Transformer Engine keeps them in the modules. Its reference linears have none, and read the config's.
    """
    found = defaultdict[str, set[float]](set)
    for chunk in chunks:
        for path, module in chunk.named_modules():
            name = re.sub(r"\.\d+(?=\.)", ".*", path.replace("module.", ""))
            own = dict(module.named_parameters(recurse=False))  # an adapter's `weight` merges it, a collective
            fused = "layer_norm_weight" in own
            is_norm = fused or ("weight" in own and own["weight"].ndim == 1)
            of_config = getattr(getattr(module, "config", None), "layernorm_epsilon", None)
            eps = getattr(module, "eps", of_config if fused else None)
            if is_norm and isinstance(eps, float) and name.startswith(("decoder.", "language_model.decoder.")):
                found[name].add(eps)
    return {name: sorted(values) for name, values in found.items()}


def _read(path: Path) -> dict[str, Any]:
    from transformers import AutoConfig

    return dict(AutoConfig.from_pretrained(path, local_files_only=True).to_dict())


def _texts(values: dict[str, Any]) -> dict[str, str]:
    return {key: json.dumps(value, sort_keys=True, default=str) for key, value in values.items()}


def _plain(value: Any) -> Any:
    """A number, flag, name or list as it is, an enum or function by its name; an ellipsis for anything else."""
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return str(value)
    if isinstance(value, list | tuple):
        parts = [_plain(item) for item in value]
        return ... if ... in parts else parts
    return getattr(value, "__name__", ...) if callable(value) else ...
