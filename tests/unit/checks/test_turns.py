"""The calculator and its second reader, which share no code: the same value, or none, for any text.

What this does not exercise: episodes (tests/dist/test_train_tools.py), and the bugs that DAT006 catches (tests/faults).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.checks.turns import calculated
from verifier.environments.calculator import Calculator

CASES = {
    "37+85=": "122", "is 2*3+4=": "10", "4+2*3=": "10", "2-5=": "-3", "7=": "7", "1-2*3-4=": "-9", "1++2=": "2",
    "007+1=": "8", "####122": None, "=": None, "+=": None, "1+=": None, "1+1": None, "1+1= ": None, "": None,
    f"{'9' * 32}=": "9" * 32, f"{'9' * 33}=": None, f"{'9' * 15}+{'1' * 16}=": str(int("9" * 15) + int("1" * 16)),
    "1.5+1=": "6", "-3=": "3", "(1+2)=": None,
}  # fmt: skip


@pytest.mark.parametrize("text", CASES)
def test_what_a_turn_asks_for(text):
    assert Calculator().reply(["1+1=", text]) == CASES[text] == calculated(text)


@given(st.text(alphabet="0123456789+-*=# ().", max_size=40))
def test_both_readers_agree(text):
    for turn in (text, text + "="):
        assert Calculator().reply([turn]) == calculated(turn)
