"""Architectures that the installed megatron-bridge has a bridge for, read from its source: no import of Megatron."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from verifier.errors import UsageError

_PACKAGE = "megatron-bridge"
_REGISTER = ("register_bridge", "register_bridge_implementation")
"""Method of a bridge's class, and function for a further spelling."""
_KIND = re.compile(r'AutoConfig\.register\("(\w+)"')
"""Registration of a config's class with transformers, under a model type."""


@cache
def _sources() -> dict[str, bool]:
    """Architecture -> True if a bridge is registered for its name, False if for transformers' class alone."""
    found: dict[str, bool] = {}
    for path, text in _modules(_REGISTER[0]).items():
        for name, by_name in _registered(ast.parse(text, path)):
            found[name] = found.get(name, False) or by_name
    return found


def bridged() -> frozenset[str]:
    """Return the architectures that classes of megatron-bridge are registered for; empty where it is not installed."""
    return frozenset(_sources())


@cache
def configured() -> frozenset[str]:
    """Return the model types whose config's class megatron-bridge brings, and transformers may lack."""
    return frozenset(kind for text in _modules("AutoConfig.register").values() for kind in _KIND.findall(text))


def _modules(word: str) -> dict[Path, str]:
    """Texts of megatron-bridge's modules of models that have a word; none where it is not installed."""
    try:
        folder = Path(str(metadata.distribution(_PACKAGE).locate_file("megatron/bridge/models")))
    except metadata.PackageNotFoundError:
        return {}
    return {path: text for path in sorted(folder.rglob("*.py")) if word in (text := path.read_text())}


def require_bridge(config: Mapping[str, Any], model: object) -> None:
    """Refuse a model of a config.json whose architecture megatron-bridge, where it is installed, has no bridge for.

    Raises:
        UsageError: names the architecture and the model; or the model's own code, by whose class megatron-bridge looks
            for a bridge in the place of the architecture.
    """
    architecture, sources = config["architectures"][0], _sources()
    if sources and architecture not in sources:
        raise UsageError(f"unknown family: megatron-bridge has no bridge for {architecture}, which {model} holds")
    code = config.get("auto_map") or {}
    own = str(code.get("AutoModelForCausalLM") or "").rpartition(".")[2]
    if sources and own and not sources.get(own):
        raise UsageError(
            f"{model} has `auto_map` in config.json, by whose {own} megatron-bridge looks for a bridge and finds none: "
            f"remove the key, and it takes the one for transformers' {architecture}"
        )


def _registered(tree: ast.Module) -> list[tuple[str, bool]]:
    """Sources of a module's registrations, and whether they are names or classes: a constant stands for a name."""
    constants = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    calls = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in _REGISTER
    ]
    sources = [word.value for call in calls for word in call.keywords if word.arg == "source"]
    names = [source.value for source in sources if isinstance(source, ast.Constant) and isinstance(source.value, str)]
    others = [source.id for source in sources if isinstance(source, ast.Name)]
    return [(name, True) for name in names] + [(constants.get(name, name), name in constants) for name in others]
