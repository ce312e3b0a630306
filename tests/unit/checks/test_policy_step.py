"""ADV002 holds of the trainer's own estimators whatever the rewards are; LSS003 knows when ratios may be clamped.

What this does not exercise: rewards of a run (tests/dist/test_train_grpo.py).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from msgspec.structs import replace

import verifier.checks  # noqa: F401  (fills the registry)
from verifier.algorithms.advantages import advantages
from verifier.core.check import REGISTRY, run_check
from verifier.core.finding import Outcome, Verdict
from verifier.core.manifest import Manifest
from verifier.core.trace import Trace
from verifier.data.recorded import RolloutRow
from verifier.stages.advantage.records import Advantages, LossColumns, PolicyColumns
from verifier.stages.data.probe_rollouts import has_second_reader, rewards_of
from verifier.stages.loss.records import LossRows, UpdateRatios

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline")


def recorded(rewards: Sequence[float], estimator: str, groups: Sequence[str], penalties: Sequence[float]) -> Advantages:
    """Record of a batch as the trainer computes it."""
    counts = [2 + place % 3 for place in range(len(rewards))]
    found = advantages(np.array(rewards) - np.array(penalties), groups, estimator, token_counts=counts)
    ids = tuple(map(str, range(len(rewards))))
    return Advantages(
        name="advantages", version=1, estimator=estimator, ids=ids, groups=tuple(groups), trajectories=ids,
        rewards=tuple(rewards), penalties=tuple(penalties), token_counts=tuple(counts),
        advantages=tuple(found.tolist()),
    )  # fmt: skip


def judged(item: Advantages) -> Outcome:
    return run_check(REGISTRY["ADV002"], Trace(Manifest(complete=True), [item], lambda item: {}))


def groups_of(size: int, num: int) -> list[str]:
    return [str(place // size) for place in range(size * num)]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("size", [2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("reward", [0.1, 0.7, -1.3, 1e5 / 3])
def test_equal_rewards_have_advantage_zero(estimator: str, size: int, reward: float) -> None:
    """A mean of equal numbers may be rounded to another number, and a group's deviation is then nothing but that."""
    right = recorded([reward] * size * 2, estimator, groups_of(size, 2), [0.0] * size * 2)
    assert judged(right).verdict is Verdict.HOLDS
    wrong = replace(right, advantages=(1e-3, *right.advantages[1:]))
    assert judged(wrong).verdict is Verdict.VIOLATED


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("spread", [0.0, 1e-16, 1e-9, 1e-3, 1.0])
def test_what_the_estimators_round_is_allowed(estimator: str, spread: float) -> None:
    draw = np.random.default_rng(3)
    for size, level in itertools.product((3, 5, 8), (0.1, 0.7, 12.3)):
        rewards = (level + spread * draw.normal(size=4 * size)).tolist()
        penalties = (spread * draw.uniform(size=4 * size)).tolist()
        assert judged(recorded(rewards, estimator, groups_of(size, 4), penalties)).verdict is Verdict.HOLDS


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "reinforce++_baseline"])
def test_groups_of_others_are_seen(estimator: str) -> None:
    """Rewards 1e-3 apart, as those that depend on length, beside 0 and 1."""
    draw = np.random.default_rng(4)
    rewards = (0.7 + 1e-3 * draw.normal(size=16)).tolist()
    right = recorded(rewards, estimator, groups_of(4, 4), [0.0] * 16)
    other = recorded(rewards, estimator, groups_of(8, 2), [0.0] * 16)
    assert judged(replace(right, advantages=other.advantages)).verdict is Verdict.VIOLATED


@pytest.mark.parametrize(
    ("facts", "verdict"),
    [
        ({}, Verdict.HOLDS),
        ({"clamped": 3}, Verdict.VIOLATED),
        ({"clamped": 3, "first": False, "ratio_gap": 1.0}, Verdict.HOLDS),
        ({"clamped": 3, "first": False, "ratio_gap": 0.3}, Verdict.VIOLATED),
        ({"clamped": 3, "ratio_over": "engine", "ratio_gap": 4.9e8}, Verdict.HOLDS),
        ({"clamped": 3, "ratio_gap": 4.9e8}, Verdict.VIOLATED),
        ({"ratio_over": "engine", "ratio_gap": 0.3}, Verdict.HOLDS),
        ({"clamped": 3, "kl_gap": 4.9e8}, Verdict.HOLDS),
        ({"clamped": 3, "kl_gap": 0.2}, Verdict.VIOLATED),
        ({"kl_gap": 0.2, "at_reference": True}, Verdict.VIOLATED),
        ({"ratio_gap": 1e-7}, Verdict.VIOLATED),
    ],
)
def test_clamps_are_judged_where_no_log_ratio_is_beyond_the_limit(facts: dict[str, object], verdict: Verdict) -> None:
    """Later updates of a batch, ratios to an engine and distances from a far reference may be beyond 20 nats.

    An update whose ratios are not judged is compared all the same, so that its step is not inconclusive.
    """
    first = UpdateRatios(
        name="update 3", version=2, update=3, first=True, ratio_over="old", at_reference=False, ratio_gap=0.0,
        kl_gap=0.0, clipped=0, clamped=0,
    )  # fmt: skip
    trace = Trace(Manifest(complete=True), [first, replace(first, **facts)], lambda item: {})
    assert run_check(REGISTRY["LSS003"], trace).verdict is verdict


RATIOS = UpdateRatios(
    name="update 1", version=1, update=1, first=True, ratio_over="engine", at_reference=True, ratio_gap=0.1, kl_gap=0.0,
    clipped=0, clamped=0,
)  # fmt: skip
POLICY = PolicyColumns(
    name="policy inputs", version=1, ids=("a", "b"), lengths=(3, 2), ratio_over="engine", weight_level="",
    weight_cap=2.0, max_staleness=0, trained_version=0, array="policy",
)  # fmt: skip
COLUMNS = LossColumns(
    name="update 1", version=1, aggregation="token_mean", ids=("b", "a"), groups=("b", "a"), lengths=(2, 3),
    array="columns",
)  # fmt: skip
OLD = [np.nan, -1.0, -2.0, np.nan, -3.0]
"""Of the tokens of `a` and of `b`; the first of each is a prompt."""
CURRENT = [-3.0, -1.0, -2.0]
"""The same of the rows of an update, which has `b` first."""


@pytest.mark.parametrize(
    ("current", "reference", "facts", "wrong"),
    [
        (CURRENT, OLD, {}, []),
        ([-3.0, -1.0, -2.0 - 2**-22], OLD, {}, ["log-probabilities of update 1 that the loss reads"]),
        ([-3.0, -1.0, np.nan], OLD, {}, ["log-probabilities of update 1 that the loss reads"]),
        ([-3.0, -1.0, -2.5], OLD, {"first": False}, []),
        ([-3.0, -1.0, -2.5], OLD, {"ratio_over": "old", "ratio_gap": 0.0}, []),
        (CURRENT, None, {}, []),
        (CURRENT, [*OLD[:4], -3.25], {}, ["log-probabilities of the reference that the penalty reads"]),
        (CURRENT, [*OLD[:4], -3.25], {"at_reference": False}, []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("kl_in", ["penalty", "loss"])
def test_the_same_weights_score_alike(current, reference, facts, wrong, kl_in):
    """Whatever the ratio divides by, and wherever the KL is."""
    wrong = [words.replace("the penalty", f"the {kl_in}") for words in wrong]
    sentinel = np.array([1 << 32 | 1, 2 << 32 | 1, 2 << 32 | 2], np.int64)
    mask = np.array([0, 1, 1, 0, 1], bool)
    arrays = {
        "rows": {"sentinel": sentinel, "mask": np.ones(3, bool), "current": np.array(current, np.float32)},
        "columns": {"mask": mask[[3, 4, 0, 1, 2]], "weight": np.ones(5)},
        "policy": {"old": np.array(OLD, np.float32), "mask": mask, "own": mask},
    }
    if reference is not None:
        arrays["policy"]["penalty_reference" if kl_in == "penalty" else "reference"] = np.array(reference, np.float32)
    rows = LossRows(name="update 1", version=1, coordinate="", array="rows")
    records = [replace(RATIOS, **facts), POLICY, COLUMNS, rows]
    outcome = run_check(REGISTRY["LSS003"], Trace(Manifest(complete=True), records, arrays.__getitem__))
    assert outcome.error is None
    assert [item.what for item in (outcome.finding.bad if outcome.finding else [])] == wrong


ROWS = [("#### 7", "7", 1.0), ("8", "7", 0.0)]
"""Text, gold answer and right reward."""


@pytest.mark.parametrize(
    ("reward", "rows", "verdict"),
    [
        ("", ROWS, Verdict.HOLDS),
        ("answer", ROWS, Verdict.HOLDS),
        ("", [("#### 7", "7", 0.0), *ROWS], Verdict.VIOLATED),
        ("answer", [("#### 7", "7", 0.1), *ROWS], Verdict.VIOLATED),
        ("answer", [("7", "seven", 1.0), *ROWS], Verdict.VIOLATED),
        ("", [("7", "seven", 1.0), *ROWS], Verdict.HOLDS),
        ("", [(r"\\frac{1}{2}", "1/2", 1.0), *ROWS], Verdict.HOLDS),
        ("", [("#### 7", "7", 0.1), ("8", "7", 0.0)], None),
        ("", [("#### 7", "7", 1.0), ("8", "7", -1.0)], None),
        ("", [(None, "7", 1.0), ("8", None, 0.0)], None),
        ("answer", [(None, "7", 1.0), ("8", None, 0.0)], None),
        ("math_verify", ROWS, None),
    ],
)
def test_rewards_of_other_functions_are_not_judged(
    reward: str, rows: Sequence[tuple[str | None, str | None, float]], verdict: Verdict | None
) -> None:
    """A step without a reward that the second reader knows does not belong to RWD001, which would be inconclusive."""
    given = [
        RolloutRow(
            id=str(place), group="g", prompt=(1,), response=(2,), sampled=(True,), mask=(True,), logprobs=(-1.0,),
            versions=(0,), reward=value, text=text, answer=answer,
        )
        for place, (text, answer, value) in enumerate(rows)
    ]  # fmt: skip
    outcome = run_check(
        REGISTRY["RWD001"], Trace(Manifest(complete=True), [rewards_of("rewards", 1, reward, given)], lambda item: {})
    )
    assert has_second_reader(reward, given) == (verdict is not None)
    assert outcome.verdict is (Verdict.INCONCLUSIVE if verdict is None else verdict)
