"""Environments of other packages in training: a task of reasoning-gym, and an environment of verifiers with turns.

What this does not exercise: tools that verifiers serves over MCP, its sandboxes, environments with several agents.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.meta.sources import ROOT
from verifier.core import store
from verifier.data.arithmetic import VOCABULARY, tokenizer_files
from verifier.data.text_dataset import load_examples
from verifier.environments.verifiers_episodes import VerifiersEnvironment, verifiers_reward
from verifier.errors import UsageError
from verifier.model.tiny import write_tiny
from verifier.stages.data.records import EpisodeTurns
from verifier.stages.reward.records import GivenRewards
from verifier.trainer.episodes import row_of

pytestmark = pytest.mark.slow  # needs the packages of ci/locks/environments.txt
HERE = Path(__file__).parent
GYM = "reasoning-gym:chain_sum"
SUMS = "verifiers:verifiers_sums"
SHORT = ("max_terms=2", "max_digits=2", "system_prompt=direct")
COMMON = (
    "algorithm=grpo", "steps=2", "data.batch_size=4", "grpo.group_size=4", "evaluation.num_problems=4",
    "engine.kind=hf", "grpo.reward_processes=2", "verify.every=1",
)  # fmt: skip


def train(run: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "verifier", "train", *COMMON, *words, "--verify", "--run", str(run)]
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=400, env=os.environ | {"PYTHONPATH": paths}
    )  # fmt: skip


@pytest.fixture
def sums(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    return load_examples(SUMS, "grpo", options=["taskset.largest=4"])


def printable(folder: Path) -> Path:
    """A tiny model whose tokenizer writes every printable character of ASCII."""
    more = [chr(code) for code in range(33, 127) if chr(code) not in VOCABULARY]
    found = write_tiny("add", folder, changes={"vocab_size": len(VOCABULARY) + len(more)})
    content = json.loads(tokenizer_files()["tokenizer.json"])
    content["model"]["vocab"] |= {text: number for number, text in enumerate(more, len(VOCABULARY))}
    (found / "tokenizer.json").write_text(json.dumps(content))
    return found


def test_a_task_of_reasoning_gym_trains(tmp_path):
    done = train(
        tmp_path / "run", f"model={printable(tmp_path)}", f"data.source={GYM}", f"data.options=[{','.join(SHORT)}]",
        "data.num_examples=40", "grpo.reward=reasoning_gym", "grpo.max_answer_tokens=8",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "2 steps judged, all hold" in done.stdout


def test_an_environment_of_verifiers_trains(tmp_path):
    done = train(
        tmp_path / "run", "model=tiny:add", f"data.source={SUMS}", "grpo.environment=verifiers", "grpo.max_turns=3",
        "grpo.reward=verifiers", "grpo.max_answer_tokens=48", "grpo.entropy_weight=0.05",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr + done.stdout
    assert "2 steps judged, all hold" in done.stdout
    trace = store.read(tmp_path / "run" / "steps" / "000001")
    turns = next(trace.of(EpisodeTurns, name="round 0"))
    sizes = {name: turns.episodes.count(name) for name in turns.episodes}
    assert set(turns.said) == {"", "<user>-1<assistant>", "<user>-2<assistant>"}
    assert max(sizes.values()) == 3
    rewards = next(trace.of(GivenRewards, name="rewards"))
    for name, text, answer, reward in zip(rewards.ids, rewards.texts, rewards.answers, rewards.rewards, strict=True):
        assert reward == sizes[name] / 2 + 2 * (text == answer)


def test_an_episode_of_verifiers_is_as_the_package_plays_it(sums):
    environment, row = VerifiersEnvironment(), row_of(sums[1])
    first, second = (environment.reset(row, 0) for _ in range(2))
    assert environment.step(first, row["messages"], "7") == ([{"role": "user", "content": "-1"}], False)
    assert environment.step(second, row["messages"], row["answer"]) == ([], True)
    assert environment.step(first, [], "8") == ([{"role": "user", "content": "-2"}], False)
    assert (verifiers_reward(first), verifiers_reward(second)) == (1.0, 2.5)


def test_every_answer_of_reasoning_gym_is_scored_by_its_task():
    from verifier.rewards.reasoning_gym import reasoning_gym_reward

    for task in ("chain_sum", "spell_backward", "countdown", "mini_sudoku"):
        for example in load_examples(f"reasoning-gym:{task}", "grpo", count=3, seed=7):
            row = row_of(example)
            assert reasoning_gym_reward(f"<think>0</think><answer>{example.answer}</answer>", row) == 1.0
            assert reasoning_gym_reward("<answer>no</answer>", row) < 0.1


@pytest.mark.parametrize(
    ("extract", "text", "reward"),
    [
        (None, "36 - 38 = -2", 2 / 12),
        (None, "It is <answer>-2</answer>.", 1.0),
        ("answer_tag", "It is <answer>-2</answer>.", 1.0),
        ("answer_tag", "-2", 0.0),
        ("answer_tag", "<think><answer>-2</answer></think>38", 0.0),
        ("last_number", "36 - 38 = -2.", 1.0),
        ("last_number", "The difference is **-$2**", 1.0),
        ("last_number", "-2 = 36 - 38", 0.0),
        ("last_number", "#### -2, as 38 is more", 1.0),
        ("last_number", "minus two", 0.0),
    ],
)
def test_the_answer_is_extracted_before_the_task_scores_it(extract, text, reward):
    from verifier.rewards.reasoning_gym import reasoning_gym_reward

    options = SHORT if extract is None else (*SHORT, f"extract={extract}")
    found = load_examples(GYM, "grpo", count=6, options=options)[5]
    assert found.messages[-1].content.endswith("36 - 38 =")
    assert reasoning_gym_reward(text, row_of(found)) == pytest.approx(reward)


def test_problems_are_the_same_in_every_run_and_never_both_trained_on_and_held_out():
    own, again, held_out, other = (
        load_examples(GYM, "grpo", split=split, count=count, seed=seed, options=SHORT)
        for split, count, seed in (("train", 600, 3), ("train", 600, 3), ("held-out", 60, 3), ("train", 60, 4))
    )
    assert own == again
    assert len({item.question for item in (*own, *held_out)}) == 660
    assert [item.question for item in other] != [item.question for item in own[:60]]
    assert own[0].messages[0].role == "system"
    assert "tags" in own[0].messages[0].content


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        ("reasoning-gym:absent", (), "`reasoning-gym:absent` fails: ValueError: \"Dataset 'absent' not registered\""),
        (GYM, ("max_terms=0",), "`reasoning-gym:chain_sum` fails: AssertionError: 'max_terms must be >= min_terms'"),
        (GYM, ("extract=number",), "has `extract=number`: give answer_tag or last_number, or leave it out"),
        (GYM, ("terms",), "data.options has `terms`: give NAME=VALUE, such as max_terms=3"),
        (GYM, ("max_terms=1", "min_terms=1", "max_digits=1"), "has 10 problems in its split `train`, 99 asked for"),
        ("verifiers:absent", (), "`verifiers:absent` cannot be made: ModuleNotFoundError: taskset 'absent' not found"),
        (SUMS, ("id=user-sim",), "has the agents assistant, user: only one can be the model that trains"),
    ],
)
def test_what_no_package_has_is_refused(source, options, said, sums):
    with pytest.raises(UsageError) as caught:
        load_examples(source, "grpo", count=99, options=options)
    assert said in str(caught.value)
