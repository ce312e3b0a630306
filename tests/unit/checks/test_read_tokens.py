"""Tokens and texts beside a second reading: prompts, whole examples, turns of an episode, what a reward reads."""

import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.stages.data.records import EpisodeTurns, TokensRead
from verifier.stages.reward.records import GivenRewards

TURNS = EpisodeTurns(
    name="round 0", version=1, environment="echo", max_turns=2, step_wise=True, before="", after="", end=3,
    episodes=("a",) * 2, indices=(0, 1), prompts=((1,), (1, 2)), sampled=((2,), (3,)), texts=("", ""),
    replies=((), ()), said=("", ""),
)  # fmt: skip


def judged(tokens, read, *, begins=None, should_begin=None, name="a", whole=False, text="2", scored="2", turns=(),
           end=None, read_end=None, mask=None, read_mask=None):  # fmt: skip
    records = [
        TokensRead(
            name="tokens", version=1, ids=(name,), whole=whole, lengths=(len(tokens),), read_lengths=(len(read),),
            prompt_lengths=(len(tokens) if begins is None else begins,), texts=() if whole else (text,),
            read_prompt_lengths=(len(read) if should_begin is None else should_begin,), array="tokens",
            end=end, read_end=read_end,
        ),
        GivenRewards(
            name="rewards", version=1, reward="answer", ids=(name,), texts=(scored,), answers=("2",), rewards=(1.0,)
        ),
        *turns,
    ]  # fmt: skip
    arrays = {"tokens": np.array(tokens, np.int64), "read": np.array(read, np.int64)}
    if mask is not None:
        arrays |= {"mask": np.array(mask, bool), "read_mask": np.array(read_mask, bool)}
    return run_check(REGISTRY["DAT013"], Trace(Manifest(), records, lambda item: arrays))


def test_equal_tokens_and_texts_hold():
    assert judged([1, 2], [1, 2]).verdict is Verdict.HOLDS
    assert judged([1, 2], [1, 2], text="\u00e9", scored="e\u0301").verdict is Verdict.HOLDS
    assert judged([1, 2], [1, 2], scored=None).verdict is Verdict.HOLDS  # no last turn


@pytest.mark.parametrize("tokens", [[1], [1, 2, 3], [2, 2], [1, 1, 2], []])
def test_another_prompt_is_violated(tokens):
    assert judged(tokens, [1, 2]).verdict is Verdict.VIOLATED


def test_the_first_token_that_differs_is_named():
    outcome = judged([1], [1, 2])
    assert "has none from token 1 on, it should have [2]" in outcome.finding.first.sentence


@pytest.mark.parametrize(
    ("end", "read_end", "verdict"),
    [(3, 3, Verdict.HOLDS), (0, 3, Verdict.VIOLATED), (None, 3, Verdict.HOLDS), (3, None, Verdict.HOLDS)],
)
def test_the_end_token_is_that_of_the_files(end, read_end, verdict):
    assert judged([1, 2], [1, 2], end=end, read_end=read_end).verdict is verdict


def test_a_text_that_lost_its_special_tokens_is_violated():
    assert judged([1, 2], [1, 2], text="<user>2", scored="2").verdict is Verdict.VIOLATED


def test_a_prompt_of_fine_tuning_ends_where_it_should():
    assert judged([1, 2, 3], [1, 2, 3], begins=2, should_begin=2, whole=True).verdict is Verdict.HOLDS
    outcome = judged([1, 2, 3], [1, 2, 3], begins=1, should_begin=2, whole=True)
    assert "the prompt of `a` has 1 tokens, it should have 2" in outcome.finding.first.sentence


@pytest.mark.parametrize(
    ("mask", "sentence"),
    [
        ([0, 1, 1], None),
        ([0, 0, 1], "token 1 of `a`, 8, is out of the loss and should be in it"),
        ([1, 1, 1], "token 0 of `a`, 7, is in the loss and should not be"),
    ],
)
def test_each_token_of_fine_tuning_is_in_the_loss_or_out_of_it(mask, sentence):
    outcome = judged([7, 8, 9], [7, 8, 9], begins=1, should_begin=1, whole=True, mask=mask, read_mask=[0, 1, 1])
    assert outcome.verdict is (Verdict.VIOLATED if sentence else Verdict.HOLDS)
    assert sentence is None or sentence in outcome.finding.first.sentence


def test_a_later_turn_begins_with_the_prompt():
    for name, verdict in (("a/1", Verdict.HOLDS), ("a/0", Verdict.VIOLATED)):
        assert judged([1, 2, 3], [1, 2], name=name, turns=(TURNS,)).verdict is verdict
