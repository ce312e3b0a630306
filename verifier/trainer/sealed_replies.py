"""An environment whose replies are sealed as it gives them, whatever becomes of them on their way."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from verifier.core.seal import seal_of_reply
from verifier.data.examples import Message
from verifier.rewards.scorer import EpisodeHandle, RewardPool


class SealedEnvironment:
    """The environment of a pool, with a seal of each reply that may be read.

    Args:
        pool: has the episodes.
        framed: text that the template writes between the turn and the next one, for messages.
        encoded: token ids of that text by a second reader of the tokenizer's files; None where there is none.
    """

    def __init__(
        self, pool: RewardPool, framed: Callable[[Sequence[Message]], str],
        encoded: Callable[[Sequence[Message]], tuple[int, ...]] | None = None,
    ) -> None:  # fmt: skip
        self._pool, self._framed, self._encode = pool, framed, encoded
        self.path = pool.made_by
        self._seals: list[int] = []
        self._encoded: dict[str, tuple[int, ...]] = {}

    def begin(self, rows: Sequence[Mapping[str, Any]], seeds: Sequence[int]) -> list[EpisodeHandle]:
        """Begin episodes; see `RewardPool.begin`."""
        return self._pool.begin(rows, seeds)

    def step(
        self, sessions: Sequence[EpisodeHandle], turns: Sequence[Sequence[str]], names: Sequence[str],
        read: Sequence[bool],
    ) -> list[Sequence[Mapping[str, str]]]:  # fmt: skip
        """Messages after the last of an episode's turns, of some episodes; none where it ends.

        Args:
            sessions: the episodes.
            turns: texts of the turns of each.
            names: of their rows, for errors.
            read: which may have another turn, so that messages are read.
        """
        found = []
        replies = self._pool.step(sessions, [own[-1] for own in turns], names)
        for own, reply, may in zip(turns, replies, read, strict=True):
            said = () if reply.done or not may else reply.messages
            if may:
                messages = [Message(role=item["role"], content=item["content"]) for item in said]
                framed = self._framed(messages) if messages else ""
                self._seals.append(seal_of_reply(own, framed))
                if messages and self._encode is not None:
                    self._encoded[framed] = self._encode(messages)
            found.append(said)
        return found

    def take_encoded(self) -> dict[str, tuple[int, ...]]:
        """Token ids of all replies since the last call, by the second reader, by their text in its frame."""
        found, self._encoded = self._encoded, {}
        return found

    def take_seals(self) -> tuple[int, ...]:
        """Seals of all replies since the last call, in their order; of no reply too."""
        found, self._seals = tuple(self._seals), []
        return found
