"""Architectures that the installed megatron-bridge has a bridge for, read from its source: no import of Megatron."""

from __future__ import annotations

import ast
import re
from functools import cache
from importlib import metadata
from pathlib import Path

from verifier.errors import UsageError

_PACKAGE = "megatron-bridge"
_REGISTER = ("register_bridge", "register_bridge_implementation")
"""Method of a bridge's class, and function for a further spelling."""
_KIND = re.compile(r'AutoConfig\.register\("(\w+)"')
"""Registration of a config's class with transformers, under a model type."""


@cache
def bridged() -> frozenset[str]:
    """Return the architectures that classes of megatron-bridge are registered for; empty where it is not installed."""
    texts = _modules(_REGISTER[0])
    return frozenset(name for path, text in texts.items() for name in _registered(ast.parse(text, path)))


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


def require_bridge(architecture: str, model: object) -> None:
    """Refuse a model of an architecture that megatron-bridge, where it is installed, has no bridge for.

    Raises:
        UsageError: names the architecture and the model.
    """
    if bridged() and architecture not in bridged():
        raise UsageError(f"unknown family: megatron-bridge has no bridge for {architecture}, which {model} holds")


def _registered(tree: ast.Module) -> list[str]:
    """Sources of a module's registrations: strings, constants of the module, and classes by their name."""
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
    return names + [constants.get(source.id, source.id) for source in sources if isinstance(source, ast.Name)]
