"""Turns of an episode as token ids: the same as the whole conversation has, and what of them is trained on.

What this does not exercise: an engine (tests/dist/test_train_tools.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import pairwise

import pytest

from tests.byte_tokenizer import write_byte_tokenizer
from verifier.config.grpo import GrpoOptions
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.data.arithmetic import calculator_examples
from verifier.data.encode import encode_example, encode_prompt
from verifier.data.recorded import RolloutRow, check_steps, rollout_of
from verifier.data.rollout import Role
from verifier.data.tokenizer import chat_template_of, open_tokenizer
from verifier.engine.api import Sample, Sampling
from verifier.errors import UsageError
from verifier.model.tiny import write_tiny
from verifier.rewards.scorer import RewardPool
from verifier.stages.data.checks_turns import turn_differs_from_episode
from verifier.stages.data.probe_rollouts import turns_of
from verifier.trainer.episodes import Episodes, Turn, rows_of

SOLVED, ASKED = (calculator_examples("train", 4, solved=solved) for solved in (True, False))
OPTIONS = GrpoOptions(environment="calculator", max_turns=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_tokenizer(write_tiny("add", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def turns(episodes, tokenizer) -> list[Turn]:
    """The first example, solved with the calculator: two turns."""
    return played(episodes, tokenizer, 0)


def started(tokenizer, options=OPTIONS) -> Iterator[Episodes]:
    found = Episodes(options, tokenizer, tokenizer.folder)
    with RewardPool("answer", options.environment, processes=1) as pool:
        found.start(pool)
        yield found


@pytest.fixture(scope="module")
def episodes(tokenizer) -> Iterator[Episodes]:
    yield from started(tokenizer)


class Says:
    """An engine that samples given texts, a turn after the other, each with its end token."""

    def __init__(self, tokenizer, *texts: str, end: bool = True) -> None:
        self.turns = [(*tokenizer.encode(text), *([tokenizer.eos_id] * end)) for text in texts]

    def generate(self, prompts, sampling):
        own = self.turns.pop(0)
        return [[Sample(tokens=own, logprobs=tuple(-0.5 - at for at in range(len(own))))] for _ in prompts]


def play(episodes: Episodes, engine: Says, prompt, example) -> list[Turn]:
    sampling = Sampling(seed=1, temperature=1.0, max_tokens=32, stop=())
    ((found,),) = episodes.play(engine, [prompt], sampling, 1, [example])
    return found


def played(episodes, tokenizer, number: int) -> list[Turn]:
    said = [item.content for item in SOLVED[number].messages if item.role == "assistant"]
    return play(episodes, Says(tokenizer, *said), encode_prompt(ASKED[number], tokenizer), ASKED[number])


def row(turn: Turn) -> RolloutRow:
    every = (True,) * len(turn.sample.tokens)
    return RolloutRow(
        id="x", group="g", prompt=turn.prompt, response=turn.sample.tokens, sampled=every, mask=every,
        logprobs=turn.sample.logprobs, versions=(4,) * len(every), reward=1.0, text=turn.text,
    )  # fmt: skip


@pytest.mark.parametrize("number", range(len(SOLVED)))
def test_an_episode_has_the_tokens_that_fine_tuning_gives_the_conversation(episodes, tokenizer, number):
    (own,) = rows_of(played(episodes, tokenizer, number), row, step_wise=False)
    taught, trained = encode_example(SOLVED[number], tokenizer), rollout_of(own)
    assert own.tokens == taught.tokens.tolist()
    assert (trained.mask == taught.mask).all()
    assert (trained.roles == taught.roles).all()


def test_what_the_tool_says_has_no_logprob_and_no_version(turns):
    (own,) = rows_of(turns, row, step_wise=False)
    said = [at for at, role in enumerate(rollout_of(own).roles[len(own.prompt) :]) if role == Role.TOOL]
    assert len(said) == len(turns[0].reply) > 2
    assert {own.versions[at] for at in said} == {-1}
    assert all(math.isnan(own.logprobs[at]) and not own.mask[at] for at in said)
    assert [own.logprobs[at] for at in range(own.versions.index(-1))] == list(turns[0].sample.logprobs)
    assert own.text == SOLVED[0].messages[-1].content


def test_steps_are_whole_trajectories_of_the_one_rollouts_tokens(turns):
    steps = rows_of(turns, row, step_wise=True)
    check_steps(steps)
    (whole,) = rows_of(turns, row, step_wise=False)
    assert steps[-1].tokens == whole.tokens
    assert sum(sum(step.mask) for step in steps) == rollout_of(whole).mask.sum()


def test_a_reward_reads_the_last_step_alone(turns):
    first, last = rows_of(turns, row, step_wise=True)
    assert (first.text, last.text) == (None, turns[1].text)
    assert (first.trajectory, last.trajectory, last.is_last_step) == ("x", "x", True)


def test_prompts_of_later_turns_begin_with_all_earlier_ids(turns):
    for before, after in pairwise(turns):
        assert after.prompt == (*before.prompt, *before.sample.tokens, *before.reply)
    assert turns[-1].reply == ()


def test_a_turn_that_was_cut_off_gets_no_reply(episodes, tokenizer):
    (turn,) = play(episodes, Says(tokenizer, "37+85=", end=False), (1, 2), ASKED[0])
    assert turn.reply == ()


def test_replies_are_sealed_as_the_environment_speaks(episodes, tokenizer):
    episodes.played([])
    found = play(episodes, Says(tokenizer, "37+85=", "3"), (1, 2), ASKED[0])
    record = turns_of(OPTIONS, "round 0", 1, episodes.played([("x", found)]))
    assert len(record.seals) == len(found) == 2
    assert all(item.same for item in turn_differs_from_episode(Trace(Manifest(), [record], {}.__getitem__)))
    assert episodes.played([("x", found)]).seals == ()


class Talker:
    """An environment whose replies a template may write otherwise than they are."""

    def reset(self, row, seed):
        return None

    def step(self, state, messages, turn):
        return [{"role": "tool", "content": "1 $2"}], False


def test_the_ids_of_a_reply_are_read_from_what_the_environment_said(tmp_path):
    folder = write_tiny("add", tmp_path)
    settings = folder / "tokenizer_config.json"
    settings.write_text(
        settings.read_text().replace("+ message['content']", "+ (message['content'] | replace('1', '11'))")
    )
    tokenizer = open_tokenizer(folder)
    for episodes in started(tokenizer, GrpoOptions(environment=f"{__name__}:Talker", max_turns=2)):
        turn, last = play(episodes, Says(tokenizer, "7", "8"), (2,), ASKED[0])
        record = episodes.played([("x", [turn])])
        assert record is not None
        assert tokenizer.decode(turn.reply) == "<tool>11 $2<assistant>"
        assert record.read_replies == record.replies
        assert record.read_texts == ("7",)
        assert last.reply == ()


class User:
    """Two messages of other roles than a tool's."""

    def reset(self, row, seed):
        return row["answer"]

    def step(self, state, messages, turn):
        return [{"role": "tool", "content": str(len(messages))}, {"role": "user", "content": state}], False


def test_an_environment_may_say_several_messages_of_any_role(tokenizer):
    options = GrpoOptions(environment=f"{__name__}:User", max_turns=3)
    for episodes in started(tokenizer, options):
        found = play(episodes, Says(tokenizer, "7", "8", "9"), (2,), ASKED[0])
        answer = ASKED[0].answer
        assert tokenizer.decode(found[0].reply) == f"<tool>1<user>{answer}<assistant>"
        assert tokenizer.decode(found[1].reply) == f"<tool>4<user>{answer}<assistant>"
        record = turns_of(options, "round 0", 1, episodes.played([("x", found)]))
        assert all(item.same for item in turn_differs_from_episode(Trace(Manifest(), [record], {}.__getitem__)))


@pytest.mark.parametrize("given", [(), ("enable_thinking=false",)])
def test_under_qwen3s_template_sampled_reasoning_stays_before_a_reply(given, tmp_path):
    chat = chat_template_of(None, given)
    tokenizer = open_tokenizer(write_byte_tokenizer(write_tiny("qwen3", tmp_path)), chat)
    opened = "<think>\n\n</think>\n\n" if given else ""
    said = ("<think>\n37 and 85\n</think>\n\n37+85=", "<think>\nso\n</think>\n\n122")
    options = GrpoOptions(environment=f"{__name__}:User", max_turns=2, max_reply_tokens=200)
    found = Episodes(options, tokenizer, tokenizer.folder, chat)
    with RewardPool("answer", options.environment, processes=1) as pool:
        found.start(pool)
        prompt = encode_prompt(ASKED[0], tokenizer)
        turns = play(found, Says(tokenizer, *said), prompt, ASKED[0])
        record = turns_of(options, "round 0", 1, found.played([("x", turns)]))
    assert record is not None
    asked, reply = f"user\n{ASKED[0].messages[0].content}", f"user\n{ASKED[0].answer}"
    tool = f"user\n<tool_response>\n{len(ASKED[0].messages)}\n</tool_response>"
    texts = (f"<|im_start|>{text}<|im_end|>\n" for text in (asked, tool, reply))
    first, between = next(texts), "".join(texts)
    begins = f"<|im_start|>assistant\n{opened}"
    assert tokenizer.decode(turns[1].prompt) == f"{first}{begins}{said[0]}<|im_end|>\n{between}{begins}"
    assert record.read_replies == record.replies
    assert all(item.same for item in turn_differs_from_episode(Trace(Manifest(), [record], {}.__getitem__)))


def test_a_reply_that_is_longer_than_the_config_allows_is_refused(tokenizer):
    options = GrpoOptions(environment="calculator", max_turns=2, max_reply_tokens=4)
    for episodes in started(tokenizer, options):
        with pytest.raises(UsageError, match=r"replied 5 tokens, grpo\.max_reply_tokens is 4: raise it, or shorten"):
            play(episodes, Says(tokenizer, "37+85=", "8"), (2,), ASKED[0])
