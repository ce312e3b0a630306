"""A reward that raises, hangs, dies or gives no finite number ends in one sentence that names it and the rollout."""

import os
import time

import pytest

from verifier.core.seal import seal_of_reward
from verifier.errors import UsageError
from verifier.rewards.scorer import RewardPool, ScoredEpisode

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

def sometimes(completion, answer):
    if completion == "dies":
        os.abort()
    if completion == "late":
        time.sleep(60)
    return float({"raises": "x", "nan": "nan"}.get(completion, completion))

def sleeps(completion, answer):
    time.sleep(1)
    return 1.0

def by_name(answer, row, completion="", **rest):
    return row["level"]

def by_all_names(**given):
    return len(given)

def by_other_names(text, gold):
    return text == gold

def by_unknown_name(completion, answer, tools):
    return 0.0
"""


def asked(ids, completions, answers) -> list[ScoredEpisode]:
    rows = [{"id": name, "prompt": "?", "answer": answer} for name, answer in zip(ids, answers, strict=True)]
    return [
        ScoredEpisode(id=name, completion=text, row=row) for name, text, row in zip(ids, completions, rows, strict=True)
    ]  # fmt: skip


def score_rewards(name, ids, completions, answers) -> list[float]:
    with RewardPool(name, processes=1) as pool:
        return pool.score(asked(ids, completions, answers))


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "made_up_rewards.py").write_text(REWARDS)
    monkeypatch.syspath_prepend(tmp_path)
    return "made_up_rewards"


def test_answers_are_scored_in_order():
    with RewardPool("answer", processes=2) as pool:
        for _ in range(2):
            assert pool.score(asked("abc", ["#### 72.0", "7", "x"], ["72", "8", "9"])) == [1.0, 0.0, 0.0]


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
    process = RewardPool(f"{module}:hangs", processes=1, deadline_s=1.0)
    pid = process._processes[0]._child.pid
    with process, pytest.raises(UsageError, match=r"did not return within 1 s on rollout `two`: mend it"):
        process.score(asked(["two"], ["2"], ["3"]))
    assert time.monotonic() - began < 30
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("exact", "unknown reward `exact`: give answer, math_verify, reasoning_gym, verifiers or package.module:func"),
        ("absent_module:f", "failed at its start: ModuleNotFoundError: No module named 'absent_module'"),
    ],
)
def test_an_unknown_reward_is_refused(name, said):
    with pytest.raises(UsageError) as caught:
        RewardPool(name)
    assert said in str(caught.value)


def test_a_gold_answer_that_is_no_number_is_named():
    with pytest.raises(UsageError, match="failed on rollout `two`: the gold answer 'many' is no number"):
        score_rewards("answer", ["one", "two"], ["1", "2"], ["1", "many"])


def test_without_the_package_math_verify_says_what_to_install(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"the package math-verify is not installed: install math-verify==0\.9\.0"):
        RewardPool("math_verify")


def test_a_bad_reward_is_zero_and_counted_where_that_is_asked_for(module):
    with RewardPool(f"{module}:sometimes", processes=2, deadline_s=2.0, errors="zero") as pool:
        texts = ["dies", "1", "raises", "late", "nan", "1"]
        assert pool.score(asked("abcdef", texts, "111111")) == [0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
        assert (pool.take_failures(), pool.take_failures()) == (4, 0)
        given = zip(texts, [0.0, 1.0, 0.0, 0.0, 0.0, 1.0], strict=True)
        assert pool.seals == [seal_of_reward(text, "1", reward) for text, reward in given]


def test_a_gold_answer_that_is_no_number_ends_the_run_all_the_same():
    with RewardPool("answer", processes=1, errors="zero") as pool, pytest.raises(UsageError, match="is no number"):
        pool.score(asked(["one"], ["1"], ["many"]))


def test_rewards_run_side_by_side(module):
    with RewardPool(f"{module}:sleeps", processes=4) as pool:
        began = time.monotonic()
        assert pool.score(asked("abcd", "1111", "1111")) == [1.0] * 4
        assert time.monotonic() - began < 3.9, "four of a second each, one after another"


def test_a_reward_is_called_by_the_names_of_its_parameters(module):
    row = {"id": "a", "messages": [{"role": "user", "content": "?"}], "answer": "7", "level": 3}
    for name, right in (("by_name", 3.0), ("by_all_names", 6.0), ("by_other_names", 1.0)):
        with RewardPool(f"{module}:{name}", processes=1) as pool:
            assert pool.score([ScoredEpisode(id="a", completion="7", row=row)]) == [right]


def test_a_reward_that_asks_for_something_else_is_refused(module):
    with pytest.raises(UsageError, match="failed at its start: it asks for tools: a reward may ask for prompt, comple"):
        RewardPool(f"{module}:by_unknown_name", processes=1)


ENVIRONMENT = f"{__name__}:Adder"


class Adder:
    """Adds up numbers until a turn is no number; raises on `raise`, hangs on `hang`."""

    def reset(self, row, seed):
        if row["answer"] == "raise":
            raise ValueError("no such game")
        return {"sum": row["level"], "seed": seed}

    def step(self, state, messages, turn):
        if turn == "raise":
            raise RuntimeError("broken")
        if turn == "hang":
            time.sleep(60)
        if not turn.isdigit():
            return [], True
        state["sum"] += int(turn)
        return [{"role": "user", "content": f"{state['sum']} of {len(messages)}"}], False


def total(state, messages, **rest):
    return state["sum"] + len(messages) / 100


def row(name, **more):
    return {"id": name, "messages": [{"role": "user", "content": "?"}], "answer": "", "level": 1, **more}


def episodes(pool, rows, sessions, texts):
    return [
        ScoredEpisode(id=own["id"], completion=text, row=own, session=session)
        for own, session, text in zip(rows, sessions, texts, strict=True)
    ]


def test_an_episode_keeps_its_state_for_the_reward():
    rows = [row("a"), row("b", level=5), row("c")]
    with RewardPool(f"{__name__}:total", ENVIRONMENT, processes=2) as pool:
        sessions = pool.begin(rows, [1, 2, 3])
        assert [item.messages for item in pool.step(sessions, ["2", "3", "stop"], "abc")] == [
            [{"role": "user", "content": "3 of 1"}], [{"role": "user", "content": "8 of 1"}], []
        ]  # fmt: skip
        assert pool.step(sessions[:1], ["4"], "a")[0].messages[0]["content"] == "7 of 3"
        assert pool.score(episodes(pool, rows, sessions, ["4", "3", "stop"])) == [7.05, 8.03, 1.02]
        assert pool.made_by == ENVIRONMENT


@pytest.mark.parametrize(
    ("answer", "turn", "said"),
    [
        ("raise", "1", "failed on row `a`: ValueError: no such game"),
        ("", "raise", "failed on row `a`: RuntimeError: broken"),
        ("", "hang", "did not return within 1 s on row `a`: mend it, or raise grpo.reward_timeout_s"),
    ],
)
def test_an_environment_that_fails_is_named_or_counted(answer, turn, said):
    rows = [row("a", answer=answer), row("b")]
    with RewardPool(f"{__name__}:total", ENVIRONMENT, 2, 1.0) as pool, pytest.raises(UsageError) as caught:
        pool.step(pool.begin(rows, [1, 2]), [turn, "1"], "ab")
    assert str(caught.value) == f"environment `{ENVIRONMENT}` {said}"
    with RewardPool(f"{__name__}:total", ENVIRONMENT, 2, 1.0, "zero") as pool:
        sessions = pool.begin(rows, [1, 2])
        first, second = pool.step(sessions, [turn, "1"], "ab")
        assert (first.done, second.done) == (True, False)
        assert pool.score(episodes(pool, rows, sessions, [turn, "1"])) == [0.0, 2.03]
        assert pool.take_failures() == 1
        assert pool.begin(rows[1:], [3])


@pytest.mark.parametrize("name", ["collections:Counter", "absent.module:Tool", "verifier.errors:Absent"])
def test_what_is_no_environment_is_refused(name):
    with pytest.raises(UsageError, match=f"environment `{name}`"):
        RewardPool("answer", name, processes=1)
