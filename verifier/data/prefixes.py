"""Beginnings that a prompt has in common with sequences that an engine had before: what a prefix cache may hold."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import numpy as np

Tokens = Sequence[int]


class Asked:
    """Sequences that an engine was given, and went on from, since its last weights."""

    def __init__(self) -> None:
        self._rows: list[tuple[bytes, int]] = []

    def clear(self) -> None:
        """Forget them: the engine has other weights."""
        self._rows = []

    def add(self, sequences: Sequence[Tokens]) -> None:
        """Take further sequences, prompts with their answers."""
        self._rows += [(np.array(row, ">u4").tobytes(), -1) for row in sequences]

    def common(self, prompts: Sequence[Tokens], answers: Sequence[Sequence[Tokens]]) -> list[int]:
        """Tokens of each prompt, but its last, with which another sequence begins; take the answers to each.

        Sequences of the same requests count, whichever came first.
        """
        pairs = enumerate(zip(prompts, answers, strict=True))
        own = [(np.array([*row, *one], ">u4").tobytes(), at) for at, (row, every) in pairs for one in every]
        known = sorted({*self._rows, *own})
        found = []
        for at, (prompt, every) in enumerate(zip(prompts, answers, strict=True)):
            row = np.array(prompt, ">u4").tobytes()
            place = bisect_left(known, (row, -1))  # neighbours in this order have the longest common beginnings
            before = next((item for item, owner in reversed(known[:place]) if owner != at), b"")
            after = next((item for item, owner in known[place:] if owner != at), b"")
            most = len(prompt) if len(every) > 1 else max(_common(row, before), _common(row, after))
            found.append(min(most, len(prompt) - 1))
        self._rows += [(row, -1) for row, _ in own]
        return found


def _common(row: bytes, other: bytes) -> int:
    one, two = (np.frombuffer(item[: min(len(row), len(other))], ">u4") for item in (row, other))
    differ = one != two
    return int(differ.argmax()) if differ.any() else len(one)
