"""Guarded replacement of upstream names: a changed signature is an error, not a wrong number."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from verifier.errors import UsageError


@dataclass(frozen=True, slots=True)
class Patch:
    """One upstream name and its replacement.

    Raises (from `apply`):
        UsageError: the name is gone, or takes other parameters than `takes` says.
    """

    target: str
    """Upstream name, `package.module:attribute` or `package.module:Class.attribute`."""
    replacement: object
    takes: str | None = None
    """Parameter names that upstream's callable must have, separated by spaces; None if it only has to exist."""


def apply(patches: Sequence[Patch]) -> None:
    """Check every patch against the installed version, then apply all.

    Raises:
        UsageError: a name is gone or takes other parameters; nothing is patched then.
    """
    owners = [_owner(item.target) for item in patches]
    for (owner, attribute), item in zip(owners, patches, strict=True):
        if item.takes is not None:
            require_parameters(item.target, parameters(getattr(owner, attribute)), item.takes)
    for (owner, attribute), item in zip(owners, patches, strict=True):
        setattr(owner, attribute, item.replacement)


def current(target: str) -> Any:
    """Return the present value of a patch's target, or raise UsageError if the name is gone."""
    owner, attribute = _owner(target)
    return getattr(owner, attribute)


def parameters(function: Callable[..., Any]) -> str:
    """Return a callable's parameter names, separated by spaces; for a class, those of its constructor."""
    return " ".join(inspect.signature(function).parameters)


def source_parameters(module: ModuleType, path: str) -> str:
    """Return the parameter names of "Class.method" as written in the module's source.

    megatron-core's wrappers of Transformer Engine cannot be inspected without Transformer Engine: their bases are
    placeholders, or the class statement did not run.

    Raises:
        UsageError: the module's source has no such method.
    """
    class_name, method_name = path.split(".")
    for node in ast.walk(_tree(module.__file__)):
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and item.name == method_name:
                    spelled = [*item.args.posonlyargs, *item.args.args, *item.args.kwonlyargs]
                    return " ".join(argument.arg for argument in spelled[1:])
    raise UsageError(f"{module.__name__} no longer has `{path}`: this version is not supported")


def require_parameters(name: str, actual: str, expected: str) -> None:
    """Refuse a callable whose parameters changed, by a UsageError."""
    if actual != expected:
        raise UsageError(f"`{name}` takes ({actual}), expected ({expected}): this upstream version is not supported")


def _owner(target: str) -> tuple[object, str]:
    module_name, _, path = target.partition(":")
    owner: object = importlib.import_module(module_name)
    *parents, attribute = path.split(".")
    for name in parents:
        owner = getattr(owner, name, None)
    if not hasattr(owner, attribute):
        raise UsageError(f"`{target}` does not exist in the installed version, which is not supported")
    return owner, attribute


@cache
def _tree(path: str) -> ast.Module:
    with open(path, encoding="utf-8") as file:
        return ast.parse(file.read())
