"""Reading of a checkpoint's names and config.json by megatron-bridge, beside what transformers' model reads of it.

No model is built and no weight is read. For each key of config.json a provider is made of the config without the key,
so with the default of the config's class; a number within a key, which has no default, is doubled instead. A key that
changes what transformers' model reads and leaves the provider as it was is one that the trainer ignores; the other way
round, one that transformers ignores. A key with its default says nothing.
"""

from __future__ import annotations

import ast
import fnmatch
import inspect
import itertools
import json
import logging
import os
import re
import types
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, cast

MAX_NAMED = 5
"""Tensors, mappings or keys that a note names; of the rest it says how many."""
_DROPOUTS = {
    "attention_dropout": ("attention_dropout", "attention_probs_dropout_prob", "attn_pdrop"),
    "hidden_dropout": ("hidden_dropout", "hidden_dropout_prob", "resid_pdrop", "resid_dropout", "dropout"),
}
"""Field of the provider -> keys under which configs of transformers have it."""
_NOT_COMPUTED = frozenset({
    "architectures", "auto_map", "bos_token_id", "dtype", "eos_token_id", "initializer_range",
    "max_position_embeddings", "model_type", "output_router_logits", "pad_token_id", "pretraining_tp",
    "router_aux_loss_coef", "torch_dtype", "transformers_version", "use_cache", "use_mamba_kernels",
})  # fmt: skip
"""Keys that no log-probability of a token depends on: names, bounds, initialization, losses that a run switches off."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Numbers of rope that megatron-bridge holds fixed for all models of type `llama3`, as published."""
_SHARED_READERS = ("modeling_rope_utils.py", "masking_utils.py")
"""Modules of transformers that read a config for the models of all types."""
_OUTPUT = "lm_head.weight"


@dataclass(frozen=True, slots=True, kw_only=True)
class BridgeReading:
    """Differences that were found of one checkpoint."""

    unmapped: tuple[str, ...] = ()
    """Checkpoint tensors that no mapping names."""
    idle: tuple[str, ...] = ()
    """Checkpoint names of mappings, as patterns, that no tensor of the checkpoint has; looked for beside `unmapped`."""
    headless: bool = False
    """An output layer of the trainer has no mapping either, at which megatron-bridge's load ends."""
    dropouts: tuple[tuple[str, float], ...] = ()
    """Dropouts of the provider that the config has not, with their probabilities."""
    only_transformers: tuple[tuple[str, Any], ...] = ()
    """Keys of config.json, with values, that change transformers' model and not the provider."""
    only_bridge: tuple[tuple[str, Any], ...] = ()
    """Keys of config.json, with values, that change the provider and not transformers' model."""


def read_bridge(path: Path, names: Collection[str]) -> BridgeReading:
    """Return what the bridge of a checkpoint's architecture makes of it."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import megatron.bridge  # noqa: F401  (makes its classes of configs known to transformers)
    from transformers import AutoConfig, PreTrainedConfig

    with warnings.catch_warnings(), _quiet():
        warnings.simplefilter("ignore")
        config = AutoConfig.from_pretrained(str(path))
        bridge = bridge_of(config)._model_bridge
        stored = [*names]  # some mappings go by how experts are stored
        source = types.SimpleNamespace(get_all_keys=lambda: stored, has_glob=partial(fnmatch.filter, stored))
        bridge.hf_pretrained.state = types.SimpleNamespace(source=source)
        registry = bridge.mapping_registry()
        tied = bool(getattr(config, "tie_word_embeddings", False))
        patterns = [name for item in registry for name in names_in(item.hf_param)]
        unmapped = unmapped_of(names, patterns)
        only_transformers, only_bridge = readings(type(config), PreTrainedConfig.get_config_dict(path)[0])
        return BridgeReading(
            unmapped=unmapped,
            idle=idle_of(names, patterns, tied=tied) if unmapped else (),
            headless=_OUTPUT in unmapped and not tied and registry.megatron_to_hf_lookup("output_layer.weight") is None,
            dropouts=dropouts_of(provider_of(config), config),
            only_transformers=only_transformers,
            only_bridge=only_bridge,
        )


def notes_on(reading: BridgeReading, num_tensors: int) -> list[str]:
    """Sentences on a reading; none where the libraries agree and every tensor has a place."""
    who, notes = f"megatron-bridge {metadata.version('megatron-bridge')}", []
    if reading.unmapped:
        idle = f"; no tensor has the names of its {_listed(map(_quoted, reading.idle))}" if reading.idle else ""
        notes.append(
            f"{who} has no mapping of {len(reading.unmapped):,} of {num_tensors:,} checkpoint tensors, so no export "
            f"can hold them: {_listed(map(_quoted, reading.unmapped))}{idle}"
        )
    notes += [f"{who} sets {field} to {p:g}, and config.json has none" for field, p in reading.dropouts]
    for found, reader, other in (
        (reading.only_transformers, "transformers", "megatron-bridge"),
        (reading.only_bridge, "megatron-bridge", "transformers"),
    ):
        if found:
            keys = _listed(f"`{key}` = {json.dumps(value, default=str)}" for key, value in found)
            notes.append(f"{reader} reads of config.json what {other} ignores: {keys}")
    return notes


def _quoted(name: str) -> str:
    return f"`{name}`"


def _listed(items: Iterable[str]) -> str:
    named, *rest = itertools.batched(items, MAX_NAMED)
    num = sum(map(len, rest))
    return ", ".join(named) + (f" and {num:,} more" if num else "")


def bridge_of(config: Any) -> Any:
    """megatron-bridge's AutoBridge of a config with `architectures`."""
    from megatron.bridge import AutoBridge

    return AutoBridge.from_hf_config(config)


def provider_of(config: Any) -> Any:
    """Provider that the bridge makes of a config."""
    return bridge_of(config).to_megatron_provider(load_weights=False)


def unmapped_of(names: Iterable[str], patterns: Iterable[str]) -> tuple[str, ...]:
    """Names that no pattern of a mapping matches; ``*`` stands for a number and ``**`` for anything."""
    known = re.compile("|".join(f"(?:{_regex(item)})" for item in dict.fromkeys(patterns)))
    return tuple(name for name in names if not known.fullmatch(name))


def idle_of(names: Collection[str], patterns: Iterable[str], *, tied: bool) -> tuple[str, ...]:
    """Patterns that match no name; that of the output layer is not missed where it is tied."""
    return tuple(
        item
        for item in dict.fromkeys(patterns)
        if not (tied and item == _OUTPUT) and not any(re.fullmatch(_regex(item), name) for name in names)
    )


def dropouts_of(provider: Any, config: Any) -> tuple[tuple[str, float], ...]:
    """Dropouts above 0 of a provider, where the config has none under any of its names."""
    found = ((field, getattr(provider, field, None) or 0.0) for field in _DROPOUTS)
    return tuple((field, p) for field, p in found if p and not any(getattr(config, key, 0) for key in _DROPOUTS[field]))


def readings(kind: Any, fields: Mapping[str, Any]) -> tuple[tuple[tuple[str, Any], ...], tuple[tuple[str, Any], ...]]:
    """Keys that only transformers' model reads, and those that only the bridge's provider does, with their values."""
    from verifier.model.transformers_hf import REFUSALS

    trees = modeling_of(kind)
    names = {name for tree in trees for name in _read_in(tree)} - _NOT_COMPUTED | {"tie_word_embeddings"}
    words = {node.value for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Constant)}

    def read(value: Any) -> Any:
        """Part of a value that the modeling code can read: a key within it, as one of the rope, is read by its name."""
        if not isinstance(value, Mapping):
            return value
        return {key: read(item) for key, item in value.items() if key in words or isinstance(item, Mapping)}

    def both(fields: Mapping[str, Any]) -> tuple[Any, Any]:
        config = kind.from_dict(fields)
        model = {name: getattr(config, name, None) for name in names}
        provider = _plain(vars(provider_of(config)))
        return {name: read(_plain(value)) for name, value in model.items() if not callable(value)}, provider

    model, provider = both(_copied(fields))
    only_transformers, only_bridge = list[tuple[str, Any]](), list[tuple[str, Any]]()
    for key, value, others in _others(fields, _plain(kind().to_dict())):
        try:
            other_model, other_provider = both(others)
        except REFUSALS:  # a config that is refused without the key says that it is read
            continue
        if (model == other_model) != (provider == other_provider):
            (only_bridge if model == other_model else only_transformers).append((key, value))
    return tuple(only_transformers), tuple(only_bridge)


def modeling_of(kind: type) -> list[ast.Module]:
    """Source of transformers' modeling code of a config's class."""
    file = Path(inspect.getfile(kind))
    library = Path(str(metadata.distribution("transformers").locate_file("transformers")))
    own = file.with_name(file.name.replace("configuration_", "modeling_"))
    files = [own, *(library / name for name in _SHARED_READERS)]
    return [ast.parse(path.read_text(encoding="utf-8")) for path in files]


def _read_in(tree: ast.AST) -> Iterator[str]:
    """Names in ``config.NAME``, ``self.config.NAME`` and ``getattr(config, "NAME", ...)``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and _is_config(node.value):
            yield node.attr
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            owner, name = node.args[:2]
            if _is_config(owner) and isinstance(name, ast.Constant):
                yield cast(str, name.value)


def _is_config(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id.endswith("config")) or (
        isinstance(node, ast.Attribute) and node.attr.endswith("config")
    )


def _others(
    fields: Mapping[str, Any], defaults: Any, path: tuple[str, ...] = (), whole: Mapping[str, Any] | None = None
) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """Each key, dotted where it is nested, with its value and the whole config without it, or with twice the number."""
    whole = fields if whole is None else whole
    for key, value in fields.items():
        default = defaults.get(key) if isinstance(defaults, Mapping) else None
        fixed = default if default is not None else fields.get("rope_type") == "llama3" and _LLAMA3.get(key)
        if key in _NOT_COMPUTED or value is None or (path and _plain(value) == fixed):
            continue
        if isinstance(value, Mapping) and value:
            yield from _others(value, default, (*path, key), whole)
            continue
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        yield ".".join((*path, key)), value, _with(whole, (*path, key), 2 * value if path and is_number else None)


def _with(fields: Mapping[str, Any], path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """A copy with another value of one key; without the key for None."""
    (first, *rest), found = path, cast(dict[str, Any], _copied(fields))
    if rest:
        return found | {first: _with(fields[first], tuple(rest), value)}
    del found[first]
    return found if value is None else found | {first: value}


def _copied(value: Any) -> Any:
    """A copy that a config's class may change."""
    if isinstance(value, Mapping):
        return {key: _copied(item) for key, item in value.items()}
    return list(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """A value that equals another one made of an equal config: functions by their code, objects by their fields."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, partial):
        return _plain([value.func, value.args, value.keywords])
    if isinstance(value, types.FunctionType):
        return [value.__code__, _plain([cell.cell_contents for cell in value.__closure__ or ()])]
    equals: Any = type(value).__eq__
    if equals is object.__eq__ and hasattr(value, "__dict__") and not isinstance(value, type):
        return [type(value), _plain(vars(value))]
    return value


def names_in(param: str | Mapping[str, str]) -> list[str]:
    """Checkpoint names of a mapping, with wildcards."""
    return [param] if isinstance(param, str) else list(param.values())


def _regex(pattern: str) -> str:
    return re.escape(pattern).replace(r"\*\*", ".*").replace(r"\*", r"\d+")


class _quiet:  # noqa: N801 - a context, used as one
    """Warnings of transformers and megatron-bridge on configs that nobody wrote are not shown."""

    def __enter__(self) -> None:
        self._before = logging.root.manager.disable
        logging.disable(logging.WARNING)

    def __exit__(self, *_: object) -> None:
        logging.disable(self._before)


def run(context: Any) -> dict[str, Any]:
    """Rank function: sentences on `checkpoint`, of which `tensors` are to be exported."""
    tensors = context.args["tensors"]
    reading = read_bridge(Path(context.args["checkpoint"]), tensors)
    return {"notes": notes_on(reading, len(tensors)), "headless": reading.headless}
