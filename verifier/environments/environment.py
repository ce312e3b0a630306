"""Interface of an environment, and the environments by name."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from verifier.errors import UsageError

SINGLE = "single"
"""Name of no environment: an episode is one turn."""
ENVIRONMENTS = {"calculator": "verifier.environments.calculator:Calculator"}
"""Name -> class; any other environment is named "package.module:Class"."""


@runtime_checkable
class Environment(Protocol):
    """Answers turns; it keeps nothing from one call to the next, so that an episode depends on its turns alone."""

    longest_reply: int
    """Characters of a reply, at most."""

    def reply(self, turns: Sequence[str]) -> str | None:
        """Answer the last turn of an episode.

        Args:
            turns: texts of the policy's turns so far, without their end tokens.

        Returns:
            Text of the tool's message; None where the last turn asks for nothing, which ends the episode.
        """


def check_environment(name: str) -> None:
    """Refuse a name that is neither known nor spelled "package.module:Class"; nothing is imported.

    Raises:
        UsageError: lists the known names.
    """
    module, _, attribute = name.partition(":")
    if name != SINGLE and name not in ENVIRONMENTS and not (module and attribute):
        known = ", ".join((SINGLE, *ENVIRONMENTS))
        raise UsageError(f"unknown environment `{name}`: give {known} or package.module:Class")


def open_environment(name: str) -> tuple[Environment, str]:
    """Make an environment.

    Returns:
        The environment, and what made it, "package.module:Class".

    Raises:
        UsageError: see `check_environment`; its module cannot be imported, or it is no environment.
    """
    check_environment(name)
    path = ENVIRONMENTS.get(name, name)
    module, _, attribute = path.partition(":")
    try:
        made = getattr(importlib.import_module(module), attribute)()
    except (ImportError, AttributeError, TypeError) as error:
        raise UsageError(f"environment `{name}` cannot be made: {error}") from error
    if not isinstance(made, Environment):
        raise UsageError(f"environment `{name}` has no `longest_reply` or no `reply(turns)`: it is no environment")
    return made, path
