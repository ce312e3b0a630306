"""Environment of trials: it replies to every turn that was ended, so that a model of random weights has later turns."""

from __future__ import annotations

from collections.abc import Sequence


class Echo:
    """Replies with the number of turns so far."""

    longest_reply = 1

    def reply(self, turns: Sequence[str]) -> str | None:
        """Number of the turn, from 1."""
        return str(len(turns))


class Marks:
    """Replies with a token of four characters, which the vocabulary can also write as four tokens."""

    longest_reply = 5

    def reply(self, turns: Sequence[str]) -> str | None:
        """Number of the turn, from 1, after a mark."""
        return f"####{len(turns)}"


class Lengths:
    """Replies to most turns with the number of their characters, so that episodes differ in what they are told."""

    longest_reply = 3

    def reply(self, turns: Sequence[str]) -> str | None:
        """Length of the last turn; None where it is a multiple of three."""
        return str(len(turns[-1])) if len(turns[-1]) % 3 else None
