"""An environment whose replies are sealed as it gives them, whatever becomes of them on their way."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from verifier.core.seal import seal_of_reply
from verifier.environments.environment import Environment


class SealedEnvironment:
    """An environment that keeps a seal of each of its replies; see `Environment`.

    Args:
        environment: replies.
        path: what made it, "package.module:Class".
        framed: text of the tool's message, and of what comes before the next turn, for a reply.
        encoded: token ids of that text by a second reader of the tokenizer's files; None where there is none.
    """

    def __init__(
        self, environment: Environment, path: str, framed: Callable[[str], str],
        encoded: Callable[[str], tuple[int, ...]] | None = None,
    ) -> None:  # fmt: skip
        self._environment, self._framed, self._encode = environment, framed, encoded
        self.path = path
        self.longest_reply = environment.longest_reply
        self._seals: list[int] = []
        self._encoded: dict[str, tuple[int, ...]] = {}

    def reply(self, turns: Sequence[str]) -> str | None:
        """See `Environment.reply`."""
        said = self._environment.reply(turns)
        framed = "" if said is None else self._framed(said)
        self._seals.append(seal_of_reply(turns, framed))
        if said is not None and self._encode is not None:
            self._encoded[framed] = self._encode(said)
        return said

    def take_encoded(self) -> dict[str, tuple[int, ...]]:
        """Token ids of all replies since the last call, by the second reader, by their text in its frame."""
        found, self._encoded = self._encoded, {}
        return found

    def take_seals(self) -> tuple[int, ...]:
        """Seals of all replies since the last call, in their order; of no reply too."""
        found, self._seals = tuple(self._seals), []
        return found
