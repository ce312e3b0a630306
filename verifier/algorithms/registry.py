"""Losses, advantage estimators and rewards by name: those of verifier, and those that plugins register."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

from verifier.algorithms.kl import check_kl_kind
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


@dataclass(frozen=True, slots=True, kw_only=True)
class LossOptions:
    """Options of `verifier.algorithms.losses.token_loss`.

    Raises:
        UsageError: a value outside of its range, or an unknown KL estimate.
    """

    clip_low: float = 0.2
    """Ratios below 1 - clip_low are clipped; 1 or more clips none."""
    clip_high: float = 0.2
    """Ratios above 1 + clip_high are clipped; above clip_low it is DAPO's clip-higher."""
    dual_clip: float | None = None
    """Greatest ratio that counts where the advantage is negative, above 1; for `clipped` only. None: no such bound."""
    kl_weight: float = 0.0
    """Weight of the KL divergence from the reference in the loss."""
    kl_kind: str = "k3"
    """Estimate of the KL divergence: k1, k2 or k3."""
    entropy_weight: float = 0.0
    """Weight of the entropy, which is subtracted from the loss."""

    def __post_init__(self) -> None:
        check_kl_kind(self.kl_kind)
        for name in ("clip_low", "clip_high", "kl_weight"):
            if not 0 <= getattr(self, name) < math.inf:
                raise UsageError(f"{name} is {getattr(self, name)}, it must be a number of at least 0")
        if not math.isfinite(self.entropy_weight):
            raise UsageError(f"entropy_weight is {self.entropy_weight}, it must be a number")
        if self.dual_clip is not None and not 1 < self.dual_clip < math.inf:
            raise UsageError(f"dual_clip is {self.dual_clip}, it must be above 1, or none")


def check_loss(name: str, options: LossOptions, *, has_reference: bool) -> None:
    """Refuse a loss whose options contradict one another.

    Raises:
        UsageError: an unknown name, a KL term without a reference, or `dual_clip` for a loss that does not read it.
    """
    check_name("loss", name)
    if options.kl_weight and not has_reference:
        raise UsageError(f"kl_weight is {options.kl_weight:g} and there is no reference: give one, or set kl_weight=0")
    if options.dual_clip is not None and name != "clipped":
        raise UsageError(f"dual_clip is {options.dual_clip:g} and the loss is `{name}`, which has none: use `clipped`")
