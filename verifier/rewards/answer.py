"""Reward for a right number: reasoning is stripped, `####` is strict, else the last number of the text counts.

Rules, which `verifier.stages.reward.checks` follows with other code:

1. `<think>` to the next `</think>`, or to the end, is reasoning. So is all before a `</think>` that nothing opened.
2. If the rest has a `####`, the answer is the number right after the last one, spaces and tabs between them allowed. No
   number there, or one that goes on otherwise (`1,20`, `1.2.3`), is no answer.
3. Else the answer is the last number of the rest.
4. A number is an integer, with commas between all groups of three or without any, alone, with decimals or over a
   denominator that is not 0; or it is decimals after no digit. A sign, and a `$` on either side of it, may stand
   before it. A sign counts only after no letter, digit, `_` or `)`. Digits are ASCII, and there are at most 1,000.
5. Values are compared as rational numbers, exactly. The length of the text plays no role.

Source:
    GSM8K's `#### ` marker (Cobbe et al. 2021, arXiv 2110.14168, appendix); verl/utils/reward_score/gsm8k.py has the two
    ways "strict" and "flexible", and looks at the last 300 characters only.
"""

from __future__ import annotations

import re
from collections import deque
from fractions import Fraction

from verifier.data.examples import short
from verifier.errors import UsageError

MAX_DIGITS = 1000
_REASONING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)
_NUMBER = re.compile(
    r"""
    (?:\$(?=[-+]))?
    (?P<sign> (?<![\w)]) [-+] (?=\$?\.?\d) )?
    \$?
    (?:
        (?<!\d) (?P<whole> \d{1,3}(?:,\d{3})+(?!\d) | \d+ )
        (?: \.(?P<decimals>\d+) | /(?P<denominator>0*[1-9]\d*) )?
    |
        (?<!\d) \.(?P<only_decimals>\d+)
    )
    """,
    re.VERBOSE | re.ASCII,
)
_LESS = str.maketrans("", "", ",$+")
_GOES_ON = re.compile(r"[.,/]?\d", re.ASCII)


def without_reasoning(completion: str) -> str:
    """Text outside of reasoning, by the first rule."""
    return _REASONING.sub(" ", completion).rpartition("</think>")[2]


def answer_of(completion: str) -> Fraction | None:
    """Number that a completion gives as its answer; None if it gives none."""
    return _value(_stated(completion))


def number_of(completion: str) -> str:
    """Text of that number, without commas, `$` and a plus sign; empty if it gives none."""
    found = _stated(completion)
    return "" if found is None or _value(found) is None else found[0].translate(_LESS)


def gold_value(answer: str) -> Fraction:
    """Value of a gold answer: one number, or a solution whose last `####` has one number after it.

    Raises:
        UsageError: it is no number, which would make every completion wrong, or none right.
    """
    value = _value(_NUMBER.fullmatch(answer.rpartition("####")[2].strip()))
    if value is None:
        raise UsageError(f"the gold answer {short(answer)} is no number: mend the data, or take another reward")
    return value


def is_number(answer: str) -> bool:
    """Tell whether a gold answer has a value."""
    return _value(_NUMBER.fullmatch(answer.rpartition("####")[2].strip())) is not None


def answer_reward(completion: str, answer: str) -> float:
    """1 if the completion's answer equals the gold one, else 0.

    Raises:
        UsageError: see `gold_value`.
    """
    return float(answer_of(completion) == gold_value(answer))


def _stated(completion: str) -> re.Match[str] | None:
    text = without_reasoning(completion)
    _, marker, stated = text.rpartition("####")
    if not marker:
        last = deque(_NUMBER.finditer(text), maxlen=1)
        return last[0] if last else None
    stated = stated.lstrip(" \t")
    found = _NUMBER.match(stated)
    return None if found is None or _GOES_ON.match(stated, found.end()) else found


def _value(found: re.Match[str] | None) -> Fraction | None:
    if found is None or sum(map(str.isdigit, found[0])) > MAX_DIGITS:
        return None
    whole, decimals = found["whole"] or "0", found["decimals"] or found["only_decimals"] or ""
    value = Fraction(int(whole.replace(",", "") + decimals), 10 ** len(decimals))
    if found["denominator"]:
        value /= int(found["denominator"])
    return -value if found["sign"] == "-" else value
