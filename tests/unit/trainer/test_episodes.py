"""Turns of an episode as token ids: the same as the whole conversation has, and what of them is trained on.

What this does not exercise: an engine (tests/dist/test_train_tools.py).
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from verifier.checks.turns import turn_differs_from_episode
from verifier.config.grpo import GrpoOptions
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.data.arithmetic import calculator_examples
from verifier.data.encode import encode_example, encode_prompt
from verifier.data.recorded import RolloutRow, rollout_of, steps_of
from verifier.data.rollout import Role
from verifier.data.tokenizer import open_tokenizer
from verifier.data.trajectories import check_steps, join_steps
from verifier.engine.api import Sample
from verifier.environments.environment import open_environment
from verifier.errors import UsageError
from verifier.model.tiny import write_tiny
from verifier.trainer.episodes import Episodes, Turn, next_prompt, rows_of

SOLVED, ASKED = (calculator_examples("train", 4, solved=solved) for solved in (True, False))
OPTIONS = GrpoOptions(environment="calculator", max_turns=3)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return open_tokenizer(write_tiny("add", tmp_path_factory.mktemp("models")))


@pytest.fixture(scope="module")
def turns(tokenizer) -> list[Turn]:
    """The first example, solved with the calculator: two turns."""
    return played(tokenizer, 0)


def played(tokenizer, number: int) -> list[Turn]:
    prompt, found = encode_prompt(ASKED[number], tokenizer), []
    for message in SOLVED[number].messages:
        if message.role == "assistant":
            own = (*tokenizer.encode(message.content), tokenizer.eos_id)
            sample = Sample(tokens=own, logprobs=tuple(-0.5 - at for at in range(len(own))))
            ((turn,),) = Episodes(OPTIONS, tokenizer, tokenizer.folder).first([prompt], [[sample]])[0]
            found.append(turn)
            prompt = next_prompt(turn)
    return found


def row(turn: Turn) -> RolloutRow:
    every = (True,) * len(turn.sample.tokens)
    return RolloutRow(
        id="x", group="g", prompt=turn.prompt, response=turn.sample.tokens, sampled=every, mask=every,
        logprobs=turn.sample.logprobs, versions=(4,) * len(every), reward=1.0, text=turn.text,
    )  # fmt: skip


@pytest.mark.parametrize("number", range(len(SOLVED)))
def test_an_episode_has_the_tokens_that_fine_tuning_gives_the_conversation(tokenizer, number):
    (own,) = rows_of(played(tokenizer, number), row, step_wise=False)
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


def test_steps_are_whole_trajectories_that_join_to_the_one_rollout(turns):
    steps = steps_of(rows_of(turns, row, step_wise=True))
    check_steps(steps)
    (whole,) = rows_of(turns, row, step_wise=False)
    (joined,) = join_steps(steps)
    assert joined.tokens.tolist() == whole.tokens
    assert (joined.mask == rollout_of(whole).mask).all()


def test_a_reward_reads_the_last_step_alone(turns):
    first, last = rows_of(turns, row, step_wise=True)
    assert (first.text, last.text) == (None, turns[1].text)
    assert (first.trajectory, last.trajectory, last.is_last_step) == ("x", "x", True)


def test_prompts_of_later_turns_begin_with_all_earlier_ids(turns):
    for before, after in pairwise(turns):
        assert after.prompt == (*before.prompt, *before.sample.tokens, *before.reply)
    assert turns[-1].reply == ()


def test_a_turn_that_was_cut_off_gets_no_reply(tokenizer):
    cut = Sample(tokens=tokenizer.encode("37+85="), logprobs=(-1.0,) * 6)
    ((turn,),) = Episodes(OPTIONS, tokenizer, tokenizer.folder).first([(1, 2)], [[cut]])[0]
    assert turn.reply == ()


def test_replies_are_sealed_as_the_environment_speaks(tokenizer):
    played = Episodes(OPTIONS, tokenizer, tokenizer.folder)
    own = (*tokenizer.encode("37+85="), tokenizer.eos_id)
    ((turn,),) = played.first([(1, 2)], [[Sample(tokens=own, logprobs=(-1.0,) * len(own))]])[0]
    last = Turn(prompt=next_prompt(turn), sample=Sample(tokens=own[:1], logprobs=(-1.0,)), text="3")
    record = played.record(1, "round 0", [("x", [turn, last])])
    assert len(record.seals) == 1
    assert all(item.same for item in turn_differs_from_episode(Trace(Manifest(), [record], {}.__getitem__)))
    assert played.record(1, "round 1", [("x", [turn, last])]).seals == ()


@pytest.mark.parametrize("name", ["collections:Counter", "absent.module:Tool", "verifier.errors:Absent"])
def test_what_is_no_environment_is_refused(name):
    with pytest.raises(UsageError, match=f"environment `{name}`"):
        open_environment(name)


class Talker:
    """An environment whose replies a template may write otherwise than they are."""

    longest_reply = 9

    def reply(self, turns: list[str]) -> str:
        return "1 $2"


def test_the_ids_of_a_reply_are_read_from_what_the_environment_said(tmp_path):
    folder = write_tiny("add", tmp_path)
    settings = folder / "tokenizer_config.json"
    settings.write_text(
        settings.read_text().replace("+ message['content']", "+ (message['content'] | replace('1', '11'))")
    )
    tokenizer = open_tokenizer(folder)
    episodes = Episodes(GrpoOptions(environment=f"{__name__}:Talker", max_turns=2), tokenizer, tokenizer.folder)
    own = (*tokenizer.encode("7"), tokenizer.eos_id)
    ((turn,),) = episodes.first([(2,)], [[Sample(tokens=own, logprobs=(-0.5, -0.5))]])[0]
    record = episodes.record(1, "round 0", [("x", [turn])])
    assert record is not None
    assert tokenizer.decode(turn.reply) == "<tool>11 $2<assistant>"
    assert record.read_replies == record.replies
    assert record.read_texts == ("7",)
