"""Second reader of answers, which shares no code with the rewards: it goes through a text character by character.

The rules are those that `verifier.rewards.answer` states. A value is a reduced fraction (numerator, denominator).
"""

from __future__ import annotations

import string
from math import gcd

Value = tuple[int, int]
"""(numerator, denominator above 0), without a common factor."""

DIGITS = frozenset(string.digits)
WORD = frozenset(string.digits + string.ascii_letters + "_")
OPEN, CLOSE, MARKER = "<think>", "</think>", "####"
MOST_DIGITS = 1000


def stated_value(completion: str) -> Value | None:
    """Value that a completion states as its answer; None if it states none."""
    text = without_reasoning(completion)
    marker = text.rfind(MARKER)
    if marker < 0:
        return last_value(text)
    at = marker + len(MARKER)
    while at < len(text) and text[at] in " \t":
        at += 1
    value, end = number_at(text, at)
    follows = text[end : end + 2]
    goes_on = follows[:1] in DIGITS or (follows[:1] in (".", ",", "/") and follows[1:] in DIGITS)
    return None if end == at or goes_on else value


def gold_stated(answer: str) -> Value | None:
    """Value of a gold answer; None if it is no number."""
    text = answer[answer.rfind(MARKER) + len(MARKER) :] if MARKER in answer else answer
    text = text.strip()
    value, end = number_at(text, 0)
    return value if text and end == len(text) else None


def without_reasoning(text: str) -> str:
    """Text of a completion outside of its reasoning."""
    kept: list[str] = []
    inside = False
    at = 0
    while at < len(text):
        if inside:
            inside = not text.startswith(CLOSE, at)
            at += 1 if inside else len(CLOSE)
        elif text.startswith(OPEN, at):
            inside = True
            kept.append(" ")
            at += len(OPEN)
        elif text.startswith(CLOSE, at):
            kept.clear()
            at += len(CLOSE)
        else:
            kept.append(text[at])
            at += 1
    return "".join(kept)


def last_value(text: str) -> Value | None:
    """Value of the last number of a text."""
    value: Value | None = None
    at = 0
    while at < len(text):
        found, end = number_at(text, at)
        if end > at:
            value = found
        at = max(end, at + 1)
    return value


def number_at(text: str, start: int) -> tuple[Value | None, int]:
    """Number that begins at a place, and the place after it, which is the same place if none begins there.

    The value is None for a number of too many digits.
    """
    at = start
    negative = False
    if text[at : at + 2] in ("$-", "$+"):
        at += 1
    if text[at : at + 1] in ("-", "+") and not (at and (text[at - 1] in WORD or text[at - 1] == ")")):
        negative = text[at] == "-"
        at += 1
    if text[at : at + 1] == "$":
        at += 1
    if at and text[at - 1] in DIGITS:
        return None, start
    whole, end = _integer(text, at)
    decimals = denominator = ""
    if text[end : end + 1] == ".":
        decimals = _digits(text, end + 1)
        end += 1 + len(decimals) if decimals else 0
    elif whole and text[end : end + 1] == "/":
        denominator = _digits(text, end + 1)
        denominator = denominator if denominator.strip("0") else ""
        end += 1 + len(denominator) if denominator else 0
    if not whole and not decimals:
        return None, start
    if len(whole) + len(decimals) + len(denominator) > MOST_DIGITS:
        return None, end
    top = int((whole or "0") + decimals) * (-1 if negative else 1)
    bottom = int(denominator) if denominator else 10 ** len(decimals)
    shared = gcd(top, bottom)
    return (top // shared, bottom // shared), end


def _digits(text: str, start: int) -> str:
    end = start
    while end < len(text) and text[end] in DIGITS:
        end += 1
    return text[start:end]


def _integer(text: str, start: int) -> tuple[str, int]:
    """Digits of an integer without its commas, and the place after it."""
    digits = _digits(text, start)
    end = start + len(digits)
    if not 1 <= len(digits) <= 3:
        return digits, end
    while text[end : end + 1] == "," and len(group := _digits(text, end + 1)) == 3:
        digits += group
        end += 4
    return digits, end
