"""Environments of trials: they reply to turns of any text, so that a model of random weights has later turns."""

from __future__ import annotations

from typing import Any

from verifier.environments.environment import Messages


class Echo:
    """Replies with the number of turns so far."""

    def reset(self, row: Any, seed: int) -> dict[str, int]:
        """Count from 0."""
        return {"turns": 0}

    def step(self, state: dict[str, int], messages: Messages, turn: str) -> tuple[Messages, bool]:
        """A tool's message that depends on the number of the turn and on its text."""
        state["turns"] += 1
        said = self.said(state["turns"], turn)
        return ([], True) if said is None else ([{"role": "tool", "content": said}], False)

    def said(self, number: int, turn: str) -> str | None:
        """Number of the turn, from 1."""
        return str(number)


class Lengths(Echo):
    """Replies to most turns with the number of their characters, so that episodes differ in what they are told."""

    def said(self, number: int, turn: str) -> str | None:
        """Length of the turn; None where it is a multiple of three."""
        return str(len(turn)) if len(turn) % 3 else None
