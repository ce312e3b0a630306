"""Texts of rollouts: plain prompts, conversations, tokenizers that write a space after `<s>`, turns of an episode."""

import json

import numpy as np
import pytest

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Verdict
from verifier.core.manifest import Manifest
from verifier.core.seal import seal_of_reward
from verifier.core.trace import Trace
from verifier.data.examples import Example, Message
from verifier.data.rollout import make_rollout
from verifier.data.tokenizer import open_tokenizer
from verifier.model.tiny import write_tiny
from verifier.stages.data.probe_rollouts import rendered, texts_of
from verifier.stages.data.records import DataOrder, EpisodeTurns, RequestSeeds, RolloutTexts
from verifier.stages.reward.records import GivenRewards

TALK = json.dumps([["system", "be brief"], ["user", " 1+1= "], ["assistant", "2"], ["user", "\u00e9?"]])
CHAT = "<s>[be brief] 1+1= [2] e\u0301? ["  # the tokenizer decomposes, which does not count


def judged(
    question, written, prompt, *, text="#### 2", answer="#### 2", gold="2", turns=(), name="1/0/0/a", group="1/0/a"
):
    records = [
        DataOrder(
            name="examples", version=1, step=1, examples=("a",), prompts=(question,),
            answers=("2",), rendered=(written,),
        ),
        RolloutTexts(
            name="texts", version=1, begin="<s>", ids=(name,), groups=(group,), prompts=(prompt,), answers=(answer,)
        ),
        GivenRewards(
            name="rewards", version=1, reward="answer", ids=(name,), texts=(text,), answers=(gold,), rewards=(1.0,)
        ),
        *turns,
    ]  # fmt: skip
    return run_check(REGISTRY["DAT009"], Trace(Manifest(), records, lambda item: {"array": np.zeros(1, np.int64)}))


@pytest.mark.parametrize("prompt", ["<s>1+1=", "<s> 1+1="])
def test_a_plain_prompt_holds_with_its_beginning(prompt):
    assert judged("1+1=", "<s>1+1=", prompt).verdict is Verdict.HOLDS


@pytest.mark.parametrize("prompt", ["1+1=", "<s><s>1+1=", "<s>+1=", "<s>2+1=", "<s>1+1= "])
def test_a_plain_prompt_that_is_cut_or_doubled_is_violated(prompt):
    assert judged("1+1=", "<s>1+1=", prompt).verdict is Verdict.VIOLATED


def test_a_conversation_has_what_users_say_in_order():
    assert judged(TALK, CHAT, CHAT).verdict is Verdict.HOLDS
    assert judged(TALK, CHAT, CHAT.removesuffix(" [")).verdict is Verdict.VIOLATED
    other = CHAT.replace("1+1=", "1+2=")
    assert judged(TALK, other, other).verdict is Verdict.VIOLATED  # a template that lost what was asked


def test_texts_and_gold_answers_are_the_rollouts_own():
    assert judged("1+1=", "<s>1+1=", "<s>1+1=", gold="3").verdict is Verdict.VIOLATED
    assert judged("1+1=", "<s>1+1=", "<s>1+1=", text="#### 3").verdict is Verdict.VIOLATED
    assert judged("1+1=", "<s>1+1=", "<s>1+1=", text=None, gold="3").verdict is Verdict.HOLDS  # no last turn
    assert judged("1+1=", "<s>1+1=", "<s>1+1=", group="1/1/a").verdict is Verdict.VIOLATED


def test_rewards_are_those_that_their_processes_gave_for_the_texts():
    def judged_by(*given):
        seeds = RequestSeeds(name="round 0", version=1, round=0, turns=(), rewards=tuple(map(seal_of_reward, *given)))
        return judged("1+1=", "<s>1+1=", "<s>1+1=", turns=[seeds]).verdict

    assert judged_by(["#### 2", "#### 3"], ["2", "2"], [1.0, 0.0]) is Verdict.HOLDS
    assert judged_by(["#### 2", "#### 3"], ["2", "2"], [0.0, 1.0]) is Verdict.VIOLATED  # those of two rows, exchanged
    assert judged_by(["#### 2"], ["3"], [1.0]) is Verdict.VIOLATED  # for another gold answer
    assert judged_by([], [], []) is Verdict.HOLDS  # an older trace


def test_a_later_turn_begins_with_the_prompt():
    turns = EpisodeTurns(
        name="round 0", version=1, environment="echo", max_turns=2, step_wise=True, before="", after="", end=3,
        episodes=("1/0/0/a",) * 2, indices=(0, 1), prompts=((1,), (1, 2)), sampled=((2,), (3,)), texts=("", ""),
        replies=((), ()), said=("", ""),
    )  # fmt: skip
    for name, verdict in (("1/0/0/a/1", Verdict.HOLDS), ("1/0/0/a/0", Verdict.VIOLATED)):
        assert judged("1+1=", "<s>1+1=", "<s>1+1=2<t>", turns=(turns,), name=name).verdict is verdict


def test_texts_are_those_of_the_tokens(tmp_path):
    tokenizer = open_tokenizer(write_tiny("add", tmp_path))
    assert tokenizer.decode(tokenizer.begin_ids) == "<bos>"
    talk = Example(id="b", messages=(Message(role="user", content="1+1="),))
    assert rendered(Example(id="a", prompt="1+1="), tokenizer) == "<bos>1+1="
    assert rendered(talk, tokenizer) == "<bos><user>1+1=<assistant>"
    prompt, turn = tokenizer.encode("1+1=", begin=True), (*tokenizer.encode("2"), tokenizer.eos_id)
    tool = tokenizer.encode("<tool>2<assistant>")
    sampled = (True, True, *(False for _ in tool), True, True)
    found = texts_of(
        1, tokenizer,
        [
            make_rollout("x", prompt, turn), make_rollout("cut", prompt, turn[:-1]),
            make_rollout("turns", prompt, (*turn, *tool, *turn), sampled=sampled),
            make_rollout("said nothing", prompt, (*turn, *tool), sampled=sampled[: -len(turn)]),
        ],
    )  # fmt: skip
    assert found.prompts == ("<bos>1+1=",) * 4
    assert found.answers == ("2", "2", "2", "")
