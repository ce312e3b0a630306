"""Environment of trials: it replies to every turn that was ended, so that a model of random weights has later turns."""

from __future__ import annotations

from collections.abc import Sequence


class Echo:
    """Replies with the number of turns so far."""

    longest_reply = 1

    def reply(self, turns: Sequence[str]) -> str | None:
        """Number of the turn, from 1."""
        return str(len(turns))
