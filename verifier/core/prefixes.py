"""Most that a prefix cache can hold of a prompt: what another sequence begins with that the engine had."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np


class Asked:
    """Sequences that an engine was given, and went on from, since its last weights."""

    def __init__(self) -> None:
        self._rows: list[bytes] = []

    def add(self, sequences: Iterable[Sequence[int]]) -> None:
        """Take further sequences."""
        self._rows += [np.array(row, ">u4").tobytes() for row in sequences]

    def common(self, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[Sequence[int]]]) -> list[int]:
        """Tokens of each prompt, but its last, with which another sequence begins, earlier or beside it."""
        pairs = [*zip(prompts, answers, strict=True)]
        firsts = [np.array([*prompt, *every[0]], ">u4").tobytes() for prompt, every in pairs]
        self.add([*prompt, *answer] for prompt, every in pairs for answer in every)
        self._rows.sort()  # neighbours in this order have the longest beginnings in common
        return [self._beside(row, 4 * len(prompt) - 4) for row, prompt in zip(firsts, prompts, strict=True)]

    def _beside(self, row: bytes, most: int) -> int:
        at = bisect_left(self._rows, row)
        beside = [*self._rows[max(at - 1, 0) : at], *self._rows[at + 1 : at + 2]]
        return max((_common(row[:most], other[:most]) for other in beside), default=0)


def _common(one: bytes, other: bytes) -> int:
    rows = [np.frombuffer(row[: len(min(one, other, key=len))], ">u4") for row in (one, other)]
    return int(np.flatnonzero(np.append(rows[0] != rows[1], True))[0])
