"""Architectures that the installed megatron-bridge has a bridge for, read from its source: no import of Megatron."""

from __future__ import annotations

import ast
from functools import cache
from importlib import metadata
from pathlib import Path

_PACKAGE = "megatron-bridge"
_REGISTER = "register_bridge"


@cache
def bridged() -> frozenset[str]:
    """Return the architectures that classes of megatron-bridge are registered for; empty where it is not installed."""
    try:
        folder = Path(str(metadata.distribution(_PACKAGE).locate_file("megatron/bridge/models")))
    except metadata.PackageNotFoundError:
        return frozenset()
    texts = ((path, path.read_text()) for path in sorted(folder.rglob("*.py")))
    return frozenset(name for path, text in texts if _REGISTER in text for name in _registered(ast.parse(text, path)))


def version() -> str:
    """Return megatron-bridge's version, or "(not installed)"."""
    try:
        return metadata.version(_PACKAGE)
    except metadata.PackageNotFoundError:
        return "(not installed)"


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
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == _REGISTER
    ]
    sources = [word.value for call in calls for word in call.keywords if word.arg == "source"]
    names = [source.value for source in sources if isinstance(source, ast.Constant) and isinstance(source.value, str)]
    return names + [constants.get(source.id, source.id) for source in sources if isinstance(source, ast.Name)]
