"""Rewards against a second reader of answers, which shares no code with them and reads character by character.

The rules are those that `verifier.rewards.answer` states.
"""

from __future__ import annotations

import string
from collections.abc import Iterator
from fractions import Fraction

from verifier.core.check import Comparison, Trace, check, compare_value
from verifier.core.condition import NEEDS, condition, knob, on, told
from verifier.stages.checks_conditions import EXAMINED, GRPO, REWARDED
from verifier.stages.reward.records import GivenRewards

DIGITS = frozenset(string.digits)
WORD = frozenset(string.digits + string.ascii_letters + "_")
OPEN, CLOSE, MARKER = "<think>", "</think>", "####"
MOST_DIGITS = 1000


def stated_value(completion: str) -> Fraction | None:
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


def gold_stated(answer: str) -> Fraction | None:
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


def last_value(text: str) -> Fraction | None:
    """Value of the last number of a text."""
    value: Fraction | None = None
    at = 0
    while at < len(text):
        found, end = number_at(text, at)
        if end > at:
            value = found
        at = max(end, at + 1)
    return value


def number_at(text: str, start: int) -> tuple[Fraction | None, int]:
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
    return Fraction(top, bottom), end


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


SECOND_READER = condition(
    "the reward has no second reader",
    lambda run: knob(run, "grpo.reward") == "answer" or knob(run, "data.rollouts") is not None,
)  # fmt: skip


@check(
    "RWD001", needs=(GivenRewards,),
    applies=on(
        step=GRPO & REWARDED & SECOND_READER,
        export=EXAMINED & SECOND_READER,
        loop=NEEDS & told("gold answers", "no gold answer is known"),
    ),
)  # fmt: skip
def reward_differs_from_second_reader(trace: Trace) -> Iterator[Comparison]:
    """Every reward of a right number is what a second reader of the answer gives, which shares no code with the first.

    What it checks: per rollout whose text and gold answer are known, the reward against a reader that goes through the
    text character by character: of the reward `answer`; and of recorded rollouts whose reward has no name, if all of
    their batch are 0 or 1, where the gold answer is a number and the text has no backslash, as LaTeX has.
    Why it matters: a window that cuts a long answer, a gold answer that cannot be read and counts as right, a number
    with a comma: the policy learns what the reward says.
    Evidence: reward/rewards.
    Tolerance and its source: exact; values are compared as fractions.
    Where to look: how the reward reads the answer and the gold answer.
    What it does not catch: rewards of other functions, such as -1 and 1, or `math_verify` of LaTeX; of recorded
    rollouts without `rewarded_by` a gold answer that is no number; a rule that both readers have wrong.
    References: verl#7274, cookbook#335, SkyRL#1816.
    """
    for item in trace.of(GivenRewards):
        named = item.reward == "answer"
        if not named and (item.reward or not set(item.rewards) <= {0.0, 1.0}):
            continue
        for name, text, answer, reward in zip(item.ids, item.texts, item.answers, item.rewards, strict=True):
            if text is None or answer is None:
                continue
            gold = gold_stated(answer)
            if not named and (gold is None or "\\" in text):
                continue
            expected = float(gold is not None and stated_value(text) == gold)
            says = f"the reward, for `{text[-40:]}`", f"the second reader; the gold answer is `{answer}`"
            yield compare_value(item, name, reward, expected, subject=f"the reward of `{name}`", says=says)
