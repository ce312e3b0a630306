"""An environment whose replies are sealed as it gives them, whatever becomes of them on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verifier.core.seal import seal_of_reply
from verifier.environments.environment import Environment


class SealedEnvironment:
    """An environment that keeps a seal of each of its replies; see `Environment`.

    Args:
        environment: replies.
        framed: text of the tool's message, and of what comes before the next turn, for a reply.
    """

    def __init__(self, environment: Environment, framed: Callable[[str], str]) -> None:
        self._environment, self._framed = environment, framed
        self.longest_reply = environment.longest_reply
        self._seals: list[int] = []

    def reply(self, turns: Sequence[str]) -> str | None:
        """See `Environment.reply`."""
        said = self._environment.reply(turns)
        self._seals.append(seal_of_reply(turns, "" if said is None else self._framed(said)))
        return said

    def take_seals(self) -> tuple[int, ...]:
        """Seals of all replies since the last call, in their order; of no reply too."""
        found, self._seals = tuple(self._seals), []
        return found
