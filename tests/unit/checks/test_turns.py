"""The calculator and its second reader, which share no code: the same value, or none, for any text.

What this does not exercise: episodes (tests/dist/test_train_tools.py), and the bugs that DAT006 catches (tests/faults).
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.core.manifest import Manifest
from verifier.core.seal import seal_of_reply
from verifier.core.trace import Trace
from verifier.environments.environment import Calculator
from verifier.stages.data.checks_turns import calculated, turn_differs_from_episode
from verifier.stages.data.records import EpisodeTurns
from verifier.stages.reward.records import GivenRewards

CASES = {
    "37+85=": "122", "is 2*3+4=": "10", "4+2*3=": "10", "2-5=": "-3", "7=": "7", "1-2*3-4=": "-9", "1++2=": "2",
    "007+1=": "8", "####122": None, "=": None, "+=": None, "1+=": None, "1+1": None, "1+1= ": None, "": None,
    f"{'9' * 32}=": "9" * 32, f"{'9' * 33}=": None, f"{'9' * 15}+{'1' * 16}=": str(int("9" * 15) + int("1" * 16)),
    "1.5+1=": "6", "-3=": "3", "(1+2)=": None,
}  # fmt: skip


@pytest.mark.parametrize("text", CASES)
def test_what_a_turn_asks_for(text):
    assert Calculator.value(text) == CASES[text] == calculated(text)


@given(st.text(alphabet="0123456789+-*=# ().", max_size=40))
def test_both_readers_agree(text):
    for turn in (text, text + "="):
        assert Calculator.value(turn) == calculated(turn)


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


FRAMED = "<tool>go on<assistant>"
SEALED = (seal_of_reply(["1+1="], FRAMED), seal_of_reply(["1+1=", "2"], ""))


@pytest.mark.parametrize(
    ("said", "seals", "wrong"),
    [
        (FRAMED, SEALED, []),
        (FRAMED, SEALED[::-1], []),
        (FRAMED, (), []),  # of an older trace
        ("<tool>go<assistant>", SEALED, ["x, seal of reply 0"]),
        (FRAMED, (seal_of_reply(["1+2="], FRAMED), SEALED[1]), ["x, seal of reply 0"]),
        (FRAMED, (SEALED[0], seal_of_reply(["1+1=", "2"], FRAMED)), ["x, seal of reply 1"]),
        (FRAMED, SEALED[:1], ["x, seal of reply 1"]),
    ],
)  # fmt: skip
def test_a_reply_is_what_the_environment_said_to_the_turns_of_its_episode(said, seals, wrong):
    turns = EpisodeTurns(
        name="round 0", version=1, environment="mine:Tool", max_turns=3, step_wise=False, before="<tool>",
        after="<assistant>", end=3, episodes=("x", "x"), indices=(0, 1), prompts=((1,), (1, 2, 3, 6, 8, 4)),
        sampled=((2, 3), (9, 3)), texts=("1+1=", "2"), replies=((6, 8, 4), ()), said=(said, ""), seals=seals,
    )  # fmt: skip
    found = turn_differs_from_episode(Trace(Manifest(), [turns], {}.__getitem__))
    assert [item.what for item in found if not item.same] == wrong


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        ((), []),  # of an older trace
        (((6, 8, 4), ()), []),
        (((), ()), []),  # text that does not stand in its frame, which is judged as text
        (((6, 8, 8, 4), ()), ["x, ids of reply 0"]),
    ],
)
def test_a_reply_has_the_tokens_that_the_tokenizers_files_make_of_its_text(read, wrong):
    turns = EpisodeTurns(
        name="round 0", version=1, environment="mine:Tool", max_turns=3, step_wise=False, before="<tool>",
        after="<assistant>", end=3, episodes=("x", "x"), indices=(0, 1), prompts=((1,), (1, 2, 3, 6, 8, 4)),
        sampled=((2, 3), (9, 3)), texts=("1+1=", "2"), replies=((6, 8, 4), ()), said=(FRAMED, ""), read_replies=read,
    )  # fmt: skip
    found = turn_differs_from_episode(Trace(Manifest(), [turns], {}.__getitem__))
    assert [item.what for item in found if not item.same] == wrong


@pytest.mark.parametrize(
    ("read", "wrong"),
    [
        ((), []),
        (("1+1=", "2"), []),
        (("1<user>+1=", "2"), ["x, text of turn 0"]),
        (("1+1=", "2 "), ["x, text of turn 1"]),
    ],
)
def test_an_environment_reads_what_the_tokens_of_a_turn_say(read, wrong):
    turns = EpisodeTurns(
        name="round 0", version=1, environment="mine:Tool", max_turns=3, step_wise=False, before="<tool>",
        after="<assistant>", end=3, episodes=("x", "x"), indices=(0, 1), prompts=((1,), (1, 2, 3, 6, 8, 4)),
        sampled=((2, 3), (9, 3)), texts=("1+1=", "2"), replies=((6, 8, 4), ()), said=(FRAMED, ""), read_texts=read,
    )  # fmt: skip
    found = turn_differs_from_episode(Trace(Manifest(), [turns], {}.__getitem__))
    assert [item.what for item in found if not item.same] == wrong


@pytest.mark.parametrize(
    ("name", "step_wise", "text", "wrong"),
    [
        ("x", False, "2", []),
        ("x", True, "2", []),  # of an evaluation
        ("x/1", True, "2", []),
        ("y", True, "1+1=2", []),  # turns of another episode are kept
        ("x", False, "1+1=2", ["x, scored text"]),
        ("x", True, "1+1=", ["x, scored text"]),
        ("x/1", True, "2 ", ["x, scored text"]),
    ],
)
def test_a_reward_reads_the_last_turn_of_an_episode(name, step_wise, text, wrong):
    turns = EpisodeTurns(
        name="round 0", version=1, environment="mine:Tool", max_turns=3, step_wise=step_wise, before="<tool>",
        after="<assistant>", end=3, episodes=("x", "x"), indices=(0, 1), prompts=((1,), (1, 2, 3, 6, 8, 4)),
        sampled=((2, 3), (9, 3)), texts=("1+1=", "2"), replies=((6, 8, 4), ()), said=(FRAMED, ""),
    )  # fmt: skip
    given = GivenRewards(
        name="held-out accuracy", version=1, reward="answer", ids=(name,), texts=(text,), answers=("2",), rewards=(1.0,)
    )
    found = turn_differs_from_episode(Trace(Manifest(), [turns, given], {}.__getitem__))
    assert [item.what for item in found if not item.same] == wrong


def test_an_environment_is_not_asked_about_turns_that_were_cut_off_or_are_the_last():
    turns = EpisodeTurns(
        name="round 0", version=1, environment="mine:Tool", max_turns=1, step_wise=False, before="<tool>",
        after="<assistant>", end=3, episodes=("x", "y"), indices=(0, 0), prompts=((1,), (1,)),
        sampled=((2, 3), (9, 9)), texts=("1+1=", "2"), replies=((), ()), said=("", ""), seals=SEALED,
    )  # fmt: skip
    found = list(turn_differs_from_episode(Trace(Manifest(), [turns], {}.__getitem__)))
    assert len(found) == 2
    assert all(item.same for item in found)
