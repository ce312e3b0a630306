"""The calculator and its second reader, which share no code: the same value, or none, for any text.

What this does not exercise: episodes (tests/dist/test_train_tools.py), and the bugs that DAT006 catches (tests/faults).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.checks.turns import calculated, turn_differs_from_episode
from verifier.core.manifest import Manifest
from verifier.core.records_policy import EpisodeTurns
from verifier.core.trace import Trace
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


@pytest.mark.parametrize("said", ["<tool>go on<assistant>", "<user>go on<assistant>", "<tool>go on"])
def test_a_reply_stands_in_the_frame_of_a_tools_message(said):
    turns = EpisodeTurns(
        name="round 0", version=1, environment="echo", max_turns=2, step_wise=False, before="<tool>",
        after="<assistant>", end=3, episodes=("x", "x"), indices=(0, 1), prompts=((1,), (1, 2, 3, 6, 8, 4)),
        sampled=((2, 3), (9, 3)), texts=("1+1=", "2"), replies=((6, 8, 4), ()), said=(said, ""),
    )  # fmt: skip
    found = turn_differs_from_episode(Trace(Manifest(), [turns], {}.__getitem__))
    wrong = [item.what for item in found if not item.same]
    assert wrong == ([] if said == "<tool>go on<assistant>" else ["x, reply 0"])
