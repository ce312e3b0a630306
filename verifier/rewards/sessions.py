"""Episodes in the process that an environment and a reward run in, with their states."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from verifier.environments.environment import Environment, Messages
from verifier.errors import UsageError

ARGUMENTS = ("prompt", "completion", "answer", "row", "state", "messages")
"""Arguments of a reward, by name: messages or text that opened the episode; text of the last turn; gold answer; row of
the data with all its columns; state of the environment at the end; all messages of the episode."""
Reward = Callable[..., object]
"""Function of some of `ARGUMENTS`, by name."""


class _Session(NamedTuple):
    row: Mapping[str, Any]
    state: Any
    messages: list[Mapping[str, str]]


class Sessions:
    """Episodes of one process."""

    def __init__(self, reward: Reward, environment: Environment | None) -> None:
        self._reward, self._environment = by_name(reward), environment
        self._open: dict[int, _Session] = {}

    def reset(self, number: int, row: Mapping[str, Any], seed: int) -> None:
        """Begin an episode, under a number of its own."""
        assert self._environment is not None
        self._open[number] = _Session(row, self._environment.reset(row, seed), list(opening(row)))

    def step(self, number: int, turn: str) -> tuple[Messages, bool]:
        """Answer a turn; see `Environment.step`."""
        assert self._environment is not None
        own = self._own(number)
        said, done = self._environment.step(own.state, tuple(own.messages), turn)
        said = [{"role": str(item["role"]), "content": str(item["content"])} for item in said]
        own.messages.extend([{"role": "assistant", "content": turn}, *said])
        if not done and not said:
            raise ValueError("it says nothing and the episode has not ended")
        return said, bool(done)

    def score(self, number: int | None, row: Mapping[str, Any], completion: str) -> object:
        """Reward of an episode, which ends; `number` is None where no environment plays."""
        own = _Session(row, None, [*opening(row), {"role": "assistant", "content": completion}])
        if number is not None:
            own = self._own(number)
            del self._open[number]
        given = (opening(row) if "messages" in row else row.get("prompt", ""), completion, row.get("answer") or "",
                 row, own.state, own.messages)  # fmt: skip
        return self._reward(dict(zip(ARGUMENTS, given, strict=True)))

    def forget(self) -> None:
        """End all episodes without a reward."""
        self._open.clear()

    def _own(self, number: int) -> _Session:
        if number not in self._open:
            raise LookupError("the process that held the episode was ended")
        return self._open[number]


def opening(row: Mapping[str, Any]) -> Messages:
    """Messages that open the episode of a row; a plain prompt is a user's."""
    found: Messages = row.get("messages") or [{"role": "user", "content": row.get("prompt", "")}]
    return found


def by_name(reward: Reward) -> Callable[[Mapping[str, Any]], object]:
    """A reward as a function of all `ARGUMENTS`: it is called with those that its parameters name.

    A function of two parameters of other names is called with completion and gold answer.

    Raises:
        UsageError: it has other parameters; names them.
    """
    try:
        parameters = inspect.signature(reward).parameters.values()
    except ValueError:  # some built-in functions have none
        return lambda given: reward(given["completion"], given["answer"])
    named = [item.name for item in parameters if item.kind in (item.POSITIONAL_OR_KEYWORD, item.KEYWORD_ONLY)]
    if any(item.kind is item.VAR_KEYWORD for item in parameters):
        named = list(ARGUMENTS)
    various = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [item for item in parameters if item.default is item.empty and item.kind not in various]
    unknown = [item.name for item in needed if item.name not in ARGUMENTS or item.kind is item.POSITIONAL_ONLY]
    if not unknown:
        asked = [name for name in named if name in ARGUMENTS]
        return lambda given: reward(**{name: given[name] for name in asked})
    if len(needed) == 2 and all(item.kind is not item.KEYWORD_ONLY for item in needed):
        return lambda given: reward(given["completion"], given["answer"])
    raise UsageError(f"it asks for {', '.join(unknown)}: a reward may ask for {', '.join(ARGUMENTS)}, by these names")
