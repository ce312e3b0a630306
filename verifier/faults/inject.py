"""Replacing a function of the real code path for a while, and only while its signature is the one that was read."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

from verifier.errors import ContractError


@contextlib.contextmanager
def replaced(target: str, parameters: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Replace ``package.module:Owner.name`` by ``make(original)``; the original returns on exit, even on an error.

    Args:
        target: module path, a colon, then the attribute path.
        parameters: the original's parameter names, comma separated, as they were when the fault was written.
        make: takes the original and gives the faulty one.

    Raises:
        ContractError: the target is gone or has other parameters: the fault would patch nothing, or something else.
    """
    module_path, _, attribute_path = target.partition(":")
    owner: Any = importlib.import_module(module_path)
    *parents, name = attribute_path.split(".")
    for parent in parents:
        owner = getattr(owner, parent, None)
    if owner is None or not hasattr(owner, name):
        raise ContractError(f"`{target}` is not there in this version: the fault cannot be injected")
    raw = inspect.getattr_static(owner, name)
    original = raw.__func__ if isinstance(raw, staticmethod | classmethod) else getattr(owner, name)
    found = ", ".join(inspect.signature(original).parameters)
    if found != parameters:
        raise ContractError(f"`{target}` has parameters ({found}), the fault was written for ({parameters})")
    faulty: Any = make(original)
    if isinstance(raw, staticmethod | classmethod):
        faulty = type(raw)(faulty)
    inherited = name not in vars(owner)
    setattr(owner, name, faulty)
    try:
        yield
    finally:
        if inherited:
            delattr(owner, name)
        else:
            setattr(owner, name, raw)
