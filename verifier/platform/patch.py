"""Guarded replacement of upstream names: a version that moved fails with a sentence, not with a wrong number."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

from verifier.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Patch:
    """One upstream name and what stands in for it.

    Raises (from `apply`):
        UsageError: the name is gone, or takes other parameters than `takes` says.
    """

    target: str
    """Where the name lives, `package.module:attribute` or `package.module:Class.attribute`."""
    replacement: object
    takes: str | None = None
    """Parameter names that upstream's callable must have, separated by spaces; None where only existence is needed."""


def apply(patches: Sequence[Patch]) -> None:
    """Check every patch against what is installed, then install them all.

    Raises:
        UsageError: some name does not look as expected; nothing is patched then.
    """
    owners = [_owner(item.target) for item in patches]
    for (owner, attribute), item in zip(owners, patches, strict=True):
        if item.takes is not None:
            require_parameters(item.target, parameters(getattr(owner, attribute)), item.takes)
    for (owner, attribute), item in zip(owners, patches, strict=True):
        setattr(owner, attribute, item.replacement)


def current(target: str) -> Any:
    """What a patch's target is now.

    Raises:
        UsageError: the name is gone.
    """
    owner, attribute = _owner(target)
    return getattr(owner, attribute)


def parameters(function: object) -> str:
    """Parameter names of a callable, separated by spaces; of a class, those of its constructor without the instance."""
    if isinstance(function, type):
        maker = function.__init__ if function.__init__ is not object.__init__ else function.__new__
        return " ".join(list(inspect.signature(maker).parameters)[1:])
    return " ".join(inspect.signature(function).parameters)


def source_parameters(module: ModuleType, path: str) -> str:
    """Parameter names of a method as written in the module's source, whether or not the import defined it.

    Transformer Engine's wrappers in megatron-core cannot be inspected where Transformer Engine is absent: their base
    classes are placeholders there, or the class statement did not run at all.

    Args:
        module: an imported module.
        path: "Class.method".

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
    """Refuse a callable whose parameters moved.

    Raises:
        UsageError: `actual` and `expected` differ.
    """
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
