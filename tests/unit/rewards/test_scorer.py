"""A reward that raises, hangs, dies or gives no finite number ends in one sentence that names it and the rollout."""

import os
import time

import pytest

from verifier.core.seal import seal_of_reward
from verifier.errors import UsageError
from verifier.rewards.scorer import RewardProcess, score_rewards

REWARDS = """
import os, re, time

def length(completion, answer):
    print("a reward may print")
    return len(completion) - len(answer)

def right(completion, answer):
    return completion == answer

def raises(completion, answer):
    raise ValueError(f"cannot read {completion}")

def hangs(completion, answer):
    return float(re.fullmatch("(a|aa)+$", "a" * 60 + "b") is not None)  # holds Python's lock all the while

def dies(completion, answer):
    os.abort()

def undefined(completion, answer):
    return float("nan")

def infinite(completion, answer):
    return float("inf")

def of_numpy(completion, answer):
    import numpy as np
    return {"f": np.float32(0.5), "i": np.int64(-2), "b": np.bool_(True), "0": np.array(3.0)}[completion]

def of_many(completion, answer):
    import numpy as np
    return np.ones(2)

def huge(completion, answer):
    return 10**400

def wordy(completion, answer):
    return "1.0"
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "made_up_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    return "made_up_rewards"


def test_answers_are_scored_in_order():
    with RewardProcess("answer") as process:
        for _ in range(2):
            assert process.score(["a", "b", "c"], ["#### 72.0", "7", "x"], ["72", "8", "9"]) == [1.0, 0.0, 0.0]


def test_its_process_seals_what_it_gave():
    with RewardProcess("answer") as process:
        process.score(["a"], ["#### 7"], ["7"])
        process.score(["b"], ["8"], ["7"])
        assert process.take_seals() == (seal_of_reward("#### 7", "7", 1.0), seal_of_reward("8", "7", 0.0))
        assert process.take_seals() == ()


def test_a_function_of_a_module(module):
    assert score_rewards(f"{module}:length", ["a"], ["long" * 100_000], ["x"]) == [399_999.0]
    assert score_rewards(f"{module}:right", ["a", "b"], ["1", "2"], ["1", "1"]) == [1.0, 0.0]


def test_numbers_of_numpy_are_rewards(module):
    assert score_rewards(f"{module}:of_numpy", [*"abcd"], [*"fib0"], [""] * 4) == [0.5, -2.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("raises", "failed on rollout `two`: ValueError: cannot read 2"),
        ("dies", "failed on rollout `two`: killed by SIGABRT"),
        ("undefined", "gave nan on rollout `two`: a reward is a finite number"),
        ("infinite", "gave inf on rollout `two`: a reward is a finite number"),
        ("of_many", "gave array([1., 1.]) on rollout `two`: a reward is a finite number"),
        ("huge", f"gave 1{'0' * 59} on rollout `two`: a reward is a finite number"),
        ("wordy", "gave '1.0' on rollout `two`: a reward is a finite number"),
        ("absent", "failed at its start: `made_up_rewards` has no function `absent`"),
    ],
)
def test_a_bad_reward_is_named(function, said, module):
    name = f"{module}:{function}"
    with pytest.raises(UsageError) as caught:
        score_rewards(name, ["two"], ["2"], ["3"])
    assert str(caught.value) == f"reward `{name}` {said}"


def test_a_reward_that_hangs_is_ended(module):
    began = time.monotonic()
    process = RewardProcess(f"{module}:hangs", deadline_s=1.0)
    pid = process._child.pid
    with process, pytest.raises(UsageError, match=r"did not return within 1 s on rollout `two`: mend it"):
        process.score(["two"], ["2"], ["3"])
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exact", "unknown reward `exact`: give answer, math_verify or package.module:function"),
        ("absent_module:f", "failed at its start: ModuleNotFoundError: No module named 'absent_module'"),
    ],
)
def test_an_unknown_reward_is_refused(name, said):
    with pytest.raises(UsageError) as caught:
        RewardProcess(name)
    assert said in str(caught.value)


def test_a_gold_answer_that_is_no_number_is_named():
    with pytest.raises(UsageError, match="failed on rollout `two`: the gold answer 'many' is no number"):
        score_rewards("answer", ["one", "two"], ["1", "2"], ["1", "many"])


def test_without_the_package_math_verify_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"the package math-verify is not installed: install math-verify==0\.9\.0"):
        RewardProcess("math_verify")


def test_each_completion_has_an_id_and_an_answer():
    with RewardProcess("answer") as process, pytest.raises(ValueError, match="shorter"):
        process.score(["a", "b"], ["1", "2"], ["1"])
