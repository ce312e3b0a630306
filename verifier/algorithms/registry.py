"""Losses, advantage estimators and rewards by name: those of verifier, and those that plugins register."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeAlias, TypeVar

from verifier.errors import UsageError

Kind: TypeAlias = Literal["loss", "advantage", "reward"]
Function = TypeVar("Function", bound=Callable[..., Any])

BUILT_IN: Mapping[Kind, Mapping[str, str]] = {
    "loss": dict.fromkeys(
        ("cispo", "clipped", "cross_entropy", "gspo", "importance"), "verifier.algorithms.losses"
    ),
    "advantage": dict.fromkeys(
        ("dr_grpo", "grpo", "reinforce++", "reinforce++_baseline", "rloo"), "verifier.algorithms.advantages"
    ),
    "reward": {},
}  # fmt: skip
"""Names that need no plugin, each with the module that registers it; a config is checked without loading torch."""
_REGISTERED: dict[Kind, dict[str, Callable[..., Any]]] = {"loss": {}, "advantage": {}, "reward": {}}
"""Filled while modules are imported, and only read afterwards."""


def loss(name: str) -> Callable[[Function], Function]:
    """Register a loss: (`LossInputs`, `LossOptions`) -> [T] loss per token; see `verifier.algorithms.losses`."""
    return _registered("loss", name)


def advantage(name: str) -> Callable[[Function], Function]:
    """Register an advantage estimator; see `verifier.algorithms.advantages.Estimator`."""
    return _registered("advantage", name)


def reward(name: str) -> Callable[[Function], Function]:
    """Register a reward."""
    return _registered("reward", name)


def names(kind: Kind) -> tuple[str, ...]:
    """Return the known names of a kind, sorted."""
    return tuple(sorted(BUILT_IN[kind].keys() | _REGISTERED[kind].keys()))


def check_name(kind: Kind, name: str) -> None:
    """Refuse a name that is not known, without loading what stands behind those that are.

    Raises:
        UsageError: lists the known names.
    """
    if name not in names(kind):
        known = ", ".join(names(kind)) or "none"
        raise UsageError(f"{kind} `{name}` is unknown (known: {known}): list the module that registers it in `plugins`")


def find(kind: Kind, name: str) -> Callable[..., Any]:
    """Return the function that is registered under a name.

    Raises:
        UsageError: see `check_name`.
    """
    check_name(kind, name)
    if name not in _REGISTERED[kind]:
        importlib.import_module(BUILT_IN[kind][name])
    return _REGISTERED[kind][name]


def path_of_reward(name: str) -> str:
    """Return "package.module:function" of a reward that a plugin registered; any other name as it is."""
    found = _REGISTERED["reward"].get(name)
    return name if found is None else f"{found.__module__}:{found.__qualname__}"


def load_plugins(modules: Sequence[str]) -> None:
    """Import modules, which register what they define. Every process of a run loads the same ones.

    Raises:
        UsageError: names a module that is missing, that raises, or that takes a name of another one. What it had
            registered until then is forgotten.
    """
    for module in modules:
        before = {kind: dict(table) for kind, table in _REGISTERED.items()}
        try:
            importlib.import_module(module)
        except Exception as error:  # a user's code may raise anything
            _REGISTERED.update(before)
            raise UsageError(_refusal(module, error)) from error


def _refusal(module: str, error: Exception) -> str:
    absent = isinstance(error, ModuleNotFoundError) and error.name and f"{module}.".startswith(f"{error.name}.")
    if absent:
        return f"plugin `{module}` is not found: install it, or add its folder to PYTHONPATH"
    if isinstance(error, UsageError):
        return f"plugin `{module}`: {error}"
    return f"plugin `{module}` raises {type(error).__name__} when it is imported: {error}"


def _registered(kind: Kind, name: str) -> Callable[[Function], Function]:
    def register(function: Function) -> Function:
        own = _REGISTERED[kind].get(name)
        owner = own.__module__ if own is not None else BUILT_IN[kind].get(name, function.__module__)
        if own is not None or owner != function.__module__:
            raise UsageError(f"{kind} `{name}` of `{function.__module__}` is taken by `{owner}`: rename it")
        _REGISTERED[kind][name] = function
        return function

    return register
