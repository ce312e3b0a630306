"""Two readers of answers agree with a table written by hand, with generated answers and with each other.

What this does not exercise: the process that a reward runs in (tests/unit/rewards/test_scorer.py).
"""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from verifier.errors import UsageError
from verifier.rewards.answer import answer_of, answer_reward, gold_value
from verifier.stages.reward.checks import gold_stated, stated_value

# fmt: off
BY_HAND = [
    # `####` is strict
    ("#### 72", "72"), ("####72", "72"), ("####072", "72"), ("####\t72", "72"), ("5 + 67 = 72\n#### 72", "72"),
    ("#### 72.0", "72"), ("#### 72.", "72"), ("#### $1,200", "1200"), ("#### 1,200.50", "2401/2"), ("#### -3", "-3"),
    ("#### +3", "3"), ("#### 1/2", "1/2"), ("#### 2/4", "1/2"), ("#### .5", "1/2"), ("#### -$5", "-5"),
    ("#### $-5", "-5"), ("#### 72 apples", "72"), ("#### 72km", "72"), ("#### 72%", "72"), ("#### 72\nand 5", "72"),
    ("#### 1\n#### 2", "2"), ("##### 7", "7"), ("######## 7", "7"), ("####", None), ("5 ####", None),
    ("#### the answer is 72", None), ("####\n72", None), ("#### x = 72", None), ("#### 1,20", None),
    ("#### 122,5", None), ("#### 1.2.3", None), ("#### 1/2/3", None), ("#### 1,2000", None), ("#### - 3", None),
    ("#### 1,200,300", "1200300"), ("#### 0", "0"), ("#### -0", "0"), ("#### 000", "0"), ("### 72", "72"),
    # else the last number
    ("The answer is 72.", "72"), ("72", "72"), ("5 + 67 = 72", "72"), ("37+85=122", "122"), ("10-3", "3"),
    ("it is -3", "-3"), ("(-3)", "-3"), ("f(2)-3", "3"), ("x-3", "3"), ("x_-3", "3"), ("= -3.50 dollars", "-7/2"),
    ("It costs $1,200", "1200"), ("costs $1,200.", "1200"), ("-$1,200.25", "-4801/4"), ("$5-$3", "3"),
    ("half, 1/2", "1/2"), ("1/0", "0"), ("on 1/2/2024", "2024"), ("1 / 2", "2"), ("version 1.2.3", "3"),
    ("1,2,3", "3"), ("1,20", "20"), ("1,2000", "2000"), ("1234,567", "567"), ("12,345,678", "12345678"),
    ("\\boxed{1,200}", "1200"), ("**72**", "72"), ("x=.25", "1/4"), ("no number", None), ("", None), (" \n", None),
    ("$", None), ("-", None), (".", None), ("1e5", "5"), ("\u0667\u0662", None), ("--3", "-3"), ("3--4", "-4"),
    # reasoning does not count
    ("<think>5</think>72", "72"), ("<think>#### 5</think>#### 72", "72"), ("<think>#### 72", None),
    ("#### 72 <think>5", "72"), ("5</think>#### 72", "72"), ("#### 5</think>", None), ("<think>1</think>", None),
    ("<think>a</think>7<think>b</think>", "7"), ("<think>a<think>b</think>5</think>72", "72"),
    ("1<think>x</think>2", "2"), ("<think>\n\n</think>\n\n#### 8", "8"), ("<THINK>5</THINK>", "5"),
    # neither length nor size plays a role
    ("72" + " " * 100_000, "72"), ("#### 72" + "x" * 100_000, "72"), ("#### 1" + "0" * 999, "1" + "0" * 999),
    ("#### 1" + "0" * 1000, None), ("1" + "0" * 1000, None), ("9" * 100_000, None),
]
GOLD = [
    ("72", "72"), (" 72\n", "72"), ("$1,200", "1200"), ("-3", "-3"), ("1/2", "1/2"), ("72.0", "72"),
    ("2*3=<<2*3=6>>6\n#### 6", "6"), ("#### 1,200.50", "2401/2"),
    ("", None), ("72 apples", None), ("x", None), ("1,20", None), ("1/0", None), ("####", None), ("72\n#### ", None),
    ("nan", None), ("inf", None), ("1e5", None), ("7 8", None), ("1" * 1001, None),
]
# fmt: on


def fraction(value) -> Fraction | None:
    return None if value is None else Fraction(*value) if isinstance(value, tuple) else Fraction(value)


def test_the_table_is_large_enough() -> None:
    assert len(BY_HAND) >= 80
    assert len({text for text, _ in BY_HAND}) == len(BY_HAND)


@pytest.mark.parametrize(("text", "value"), BY_HAND, ids=lambda item: repr(item)[:40])
def test_by_hand(text: str, value: str | None) -> None:
    assert answer_of(text) == fraction(value)
    assert fraction(stated_value(text)) == fraction(value)


@pytest.mark.parametrize(("text", "value"), GOLD, ids=lambda item: repr(item)[:40])
def test_gold_answers(text: str, value: str | None) -> None:
    assert fraction(gold_stated(text)) == fraction(value)
    if value is not None:
        assert gold_value(text) == fraction(value)
        return
    with pytest.raises(UsageError, match="is no number: mend the data"):
        answer_reward("#### 72", text)


def written(draw: random.Random) -> tuple[str, Fraction]:
    """A number in one of its spellings, and its value."""
    whole = draw.choice([draw.randrange(10), draw.randrange(10_000), draw.randrange(10**12)])
    value = Fraction(whole)
    text = draw.choice([str(whole), f"{whole:,}", f"{whole:05d}"])
    kind = draw.randrange(4)
    if kind == 1:
        decimals = "".join(draw.choices("0123456789", k=draw.randint(1, 6)))
        text += "." + decimals
        value += Fraction(int(decimals), 10 ** len(decimals))
    elif kind == 2:
        denominator = draw.randint(1, 999)
        text += f"/{denominator}"
        value /= denominator
    text = draw.choice(["", "$"]) + text
    sign = draw.choice(["", "", "-", "+", "$-"])
    return sign + text, -value if "-" in sign else value


def test_10_000_generated_answers() -> None:
    """Both readers find the value that the text was made from, in whatever stands around it."""
    draw = random.Random(16)
    words = ["so", "we add", "it costs $3,", "1/3 of them,", "x = 4.", "(5)", "<think>7</think>", "\n", "then -2:"]
    for _ in range(10_000):
        number, value = written(draw)
        before = " ".join(draw.choices(words, k=draw.randrange(5)))
        ending = draw.choice(["", ".", " apples", "\n", " %", "!", "<think> 9"])
        text = before + draw.choice([" ", "\n#### ", "####", " ####\t"]) + number + ending
        reasoned = draw.choice(["", "<think>6 ####", "<think>#### 8"]) + "</think>" + text
        for completion in (text, reasoned):
            assert answer_of(completion) == value, completion
            assert fraction(stated_value(completion)) == value, completion
        assert gold_value(number) == fraction(gold_stated(number)) == value, number
        assert answer_reward(text, number) == 1.0
        assert answer_reward(text, f"{value + Fraction(1, 7)}") == 0.0


def test_readers_agree_on_10_000_texts_of_no_sense() -> None:
    draw = random.Random(17)
    pieces = [*"0123456789" * 2, *",./-+$ \t\n)a_=#", "####", "<think>", "</think>", "000", ",000", "\u0663", "\u00e9"]
    found = 0
    for _ in range(10_000):
        text = "".join(draw.choices(pieces, k=draw.randrange(16)))
        assert answer_of(text) == fraction(stated_value(text)), text
        try:
            gold = gold_value(text)
        except UsageError:
            gold = None
        assert gold == fraction(gold_stated(text)), text
        found += answer_of(text) is not None
    assert 3_000 < found < 9_000  # both sides of the question occur
