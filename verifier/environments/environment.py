"""Interface of an environment, and the environments by name."""

from __future__ import annotations

import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, runtime_checkable

from verifier.errors import UsageError

SINGLE = "single"
"""Name of no environment: an episode is one turn."""
ENVIRONMENTS = {
    "calculator": "verifier.environments.environment:Calculator",
    "verifiers": "verifier.environments.verifiers_episodes:VerifiersEnvironment",
}
"""Name -> class; any other environment is named "package.module:Class"."""
Messages: TypeAlias = Sequence[Mapping[str, str]]
"""Conversation: each message has a "role", such as "tool" or "user", and a "content"."""


@runtime_checkable
class Environment(Protocol):
    """Plays the other side of episodes; many are under way at once, so what belongs to one is in its state."""

    def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        """Begin an episode.

        Args:
            row: of the data: "id", "messages", which open the episode, "answer", and all other columns.
            seed: of the episode, the same in every run of one config.

        Returns:
            State of the episode, of any type; None where there is none.
        """

    def step(self, state: Any, messages: Messages, turn: str) -> tuple[Messages, bool]:
        """Answer a turn of the model.

        Args:
            state: of the episode, to be changed in place.
            messages: of the episode before this turn.
            turn: text of the model's turn, without its end token.

        Returns:
            Messages that come before the next turn, and whether the episode has ended. It may end all the same, at
            `grpo.max_turns` or with a turn that was cut off; no message is read then.
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
    except UsageError:
        raise
    except Exception as error:  # a user's code may raise anything
        raise UsageError(f"environment `{name}` cannot be made: {type(error).__name__}: {error}") from error
    if not isinstance(made, Environment):
        raise UsageError(
            f"environment `{name}` has no `reset(row, seed)` or no `step(state, messages, turn)`: it is no environment"
        )
    return made, path


_LONGEST = 32
_CALL = re.compile(r"\d+(?:[-+*]\d+)*=\Z", re.ASCII)
_PART = re.compile(r"[-+*]|\d+", re.ASCII)


class Calculator:
    """Answers `37+85=` with `122`.

    A turn asks for a value if it ends with `=` and an expression of at most 32 characters stands before it: unsigned
    integers with `+`, `-` or `*` between them, as many as there are up to the nearest other character. Products come
    before sums. A turn of another end asks for nothing, and so does one whose value has more than 32 characters.
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> None:
        """Keep nothing: a reply depends on its turn alone."""

    def step(self, state: None, messages: Messages, turn: str) -> tuple[Messages, bool]:
        """Value of the turn's expression as a tool's message; the episode ends where there is none."""
        value = self.value(turn)
        return ([], True) if value is None else ([{"role": "tool", "content": value}], False)

    @staticmethod
    def value(turn: str) -> str | None:
        """Value of the expression that ends a turn; None where none does."""
        found = _CALL.search(turn)
        if found is None or len(found[0]) > _LONGEST + 1:
            return None
        value = str(_value(_PART.findall(found[0])))
        return value if len(value) <= _LONGEST else None


def _value(parts: Sequence[str]) -> int:
    total, term = 0, int(parts[0])
    for operator, number in zip(parts[1::2], parts[2::2], strict=True):
        if operator == "*":
            term *= int(number)
        else:
            total, term = total + term, int(number) if operator == "+" else -int(number)
    return total + term
