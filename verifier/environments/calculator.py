"""Calculator: a turn that ends with an expression and `=` is answered with its value."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from verifier.environments.environment import Messages

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
    """Value of numbers and the operators between them."""
    total, term = 0, int(parts[0])
    for operator, number in zip(parts[1::2], parts[2::2], strict=True):
        if operator == "*":
            term *= int(number)
        else:
            total, term = total + term, int(number) if operator == "+" else -int(number)
    return total + term
