"""ADV002 of other trainers' loops: no right denominator in any dtype is violated, and wrong groups are.

The loops' arithmetic is torch's own, in the dtype and with the epsilon of each; rewards are drawn.
What this does not exercise: rewards of a run (tests/dist/test_float32_loop.py).
"""

from __future__ import annotations

import numpy as np
import pytest
import torch

import verifier.checks  # noqa: F401 - fills the registry
from verifier import probe
from verifier.core.finding import Verdict
from verifier.core.store import read
from verifier.errors import UsageError
from verifier.report import report_of

DENOMINATORS = {"none": 0.0, "openrlhf": 1e-9, "verl": 1e-6, "trl": 1e-4}
DTYPES = {
    "float64": torch.float64, "float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16
}  # fmt: skip


def rewards_of(kind: str, groups: int, size: int, seed: int) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    made = {
        "right or wrong": draw.integers(0, 2, (groups, size)),
        "shares": draw.integers(0, 13, (groups, size)) / 12,
        "nearly equal": 0.7 + 1e-4 * draw.normal(size=(groups, size)),
        "large": 1e3 * draw.normal(size=(groups, size)),
        "equal tenths": np.full((groups, size), 0.1),
    }
    return torch.tensor(np.asarray(made[kind], np.float64))


def grpo(given: torch.Tensor, dtype: torch.dtype, epsilon: float, ddof: int) -> torch.Tensor:
    """Advantages as a loop in this dtype makes them; 0 where it would divide 0 by 0."""
    rewards = given.to(dtype)
    centred, deviation = rewards - rewards.mean(1, keepdim=True), rewards.std(1, keepdim=True, correction=ddof)
    return torch.where(deviation + epsilon > 0, centred / (deviation + epsilon), torch.zeros_like(centred))


def verdict(path, given: torch.Tensor, values, estimator: str = "grpo", **told) -> Verdict:
    rows, size = given.numel(), given.shape[1]
    with probe.open(path, dtype="float32") as record:
        record.rollouts(
            1, prompts=[[1, 5 + at // size] for at in range(rows)], responses=[[7, 2]] * rows,
            loss_mask=[[1, 1]] * rows, versions=0, rewards=given.flatten().tolist(),
        )  # fmt: skip
        record.trainer_logprobs(1, [[-1.0, -1.0]] * rows)
        record.advantages(1, values, estimator=estimator, **told)
    report = report_of(read(path), str(path))
    return next(item.verdict for item in report.outcomes if item.code == "ADV002")


@pytest.mark.parametrize("kind", ["right or wrong", "shares", "nearly equal", "large", "equal tenths"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_right_advantages_hold_in_every_dtype(kind, dtype, tmp_path):
    for at, (name, epsilon) in enumerate(DENOMINATORS.items()):
        ddof, size = at % 2, (3, 4, 8, 16)[at]
        given = rewards_of(kind, 4, size, seed=at)
        made = grpo(given, DTYPES[dtype], epsilon, ddof)
        if not made.isfinite().all():  # such a loop has no right advantages
            continue
        told = {"dtype": dtype, "epsilon": epsilon, "ddof": ddof}
        assert verdict(tmp_path / f"{name}-told", given, made.flatten(), **told) is Verdict.HOLDS
        assert verdict(tmp_path / f"{name}-tensor", given, made.flatten()) is Verdict.HOLDS
        assert verdict(tmp_path / f"{name}-list", given, made.flatten().tolist()) is Verdict.HOLDS


@pytest.mark.parametrize("told", [{}, {"epsilon": 1e-6}, {"epsilon": 1e-6, "ddof": 1, "dtype": "float32"}])
@pytest.mark.parametrize("kind", ["right or wrong", "shares", "large"])
def test_a_wrong_group_or_deviation_is_violated_in_float32(kind, told, tmp_path):
    given = rewards_of(kind, 4, 8, seed=3).float()
    whole = (given - given.mean()) / (given.std() + 1e-6)
    batch_deviation = (given - given.mean(1, keepdim=True)) / (given.std() + 1e-6)
    twice = grpo(grpo(given, torch.float32, 1e-6, 1).reshape(1, -1), torch.float32, 1e-6, 1)
    late = grpo(given, torch.float32, 1e-6, 1).roll(1)
    for at, wrong in enumerate((whole, batch_deviation, twice, late)):
        assert verdict(tmp_path / str(at), given, wrong.flatten(), **told) is Verdict.VIOLATED


@pytest.mark.parametrize(
    ("epsilon", "told"), [(1e-4, {"epsilon": 1e-6}), (1e-6, {"epsilon": 1e-4}), (1e-6, {"ddof": 0}), (1e-2, {})]
)
def test_another_denominator_than_the_loop_names_is_violated(epsilon, told, tmp_path):
    given = rewards_of("shares", 4, 4, seed=1)
    made = grpo(given, torch.float32, epsilon, 1)
    assert verdict(tmp_path / "trace", given, made.flatten(), **told) is Verdict.VIOLATED


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_an_advantage_that_is_not_finite_is_violated(value, tmp_path):
    given = rewards_of("equal tenths", 2, 4, seed=1)
    assert verdict(tmp_path / "trace", given, [0.0] * 7 + [value]) is Verdict.VIOLATED


OTHERS = ("grpo_batch", "grpo_others", "dr_grpo", "rloo", "reinforce++", "reinforce++_baseline")


@pytest.mark.parametrize("estimator", OTHERS)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_other_estimators_hold_by_other_formulas_of_them(estimator, dtype, tmp_path):
    """As verl writes them: a sum without one's own reward, and `rsqrt` of the unbiased variance and 1e-8."""
    for at, kind in enumerate(("right or wrong", "shares", "nearly equal", "large")):
        given = rewards_of(kind, 4, 8, seed=7)
        rewards = given.to(DTYPES[dtype])
        centred = rewards - rewards.mean(1, keepdim=True)
        if estimator == "dr_grpo":
            made = centred
        elif estimator == "grpo_batch":  # TRL's scale_rewards="batch"
            made = centred / (rewards.std() + 1e-4)
        elif estimator == "grpo_others":  # NeMo-RL's default, by two passes
            others = torch.stack([rewards[:, [it for it in range(8) if it != own]] for own in range(8)], 1)
            equal = (others == others[..., :1]).all(-1)
            made = (rewards - others.mean(-1)) / torch.where(equal, 1.0, others.std(-1) + 1e-6)
        elif estimator == "rloo":
            made = rewards - (rewards.sum(1, keepdim=True) - rewards) / 7
        else:
            tokens = (rewards if estimator == "reinforce++" else centred).flatten().repeat_interleave(2)
            whitened = (tokens - tokens.mean()) * torch.rsqrt(tokens.var() + 1e-8)
            made = whitened[::2].reshape(given.shape)
        assert verdict(tmp_path / str(at), given, made.flatten(), estimator) is Verdict.HOLDS
        wrong = made.flatten().roll(1)
        assert verdict(tmp_path / f"{at}-wrong", given, wrong, estimator) is Verdict.VIOLATED


def test_advantages_that_are_masked_hold(tmp_path):
    """Verl multiplies rows by the mask of the response, whose last tokens may be a tool's."""
    given = rewards_of("shares", 2, 4, seed=5)
    made = grpo(given, torch.float32, 1e-6, 1).flatten()
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        record.rollouts(
            1, prompts=[[1, 5 + at // 4] for at in range(8)], responses=[[7, 2]] * 8, loss_mask=[[1, 0]] * 7 + [[0, 0]],
            versions=0, rewards=given.flatten().tolist(),
        )  # fmt: skip
        record.trainer_logprobs(1, [[-1.0, -1.0]] * 8)
        record.advantages(1, [[value, 0.0] for value in made[:7]] + [[0.0, 0.0]], estimator="grpo")
    report = report_of(read(tmp_path / "trace"), "trace")
    assert report.verdict is Verdict.HOLDS, [item.finding.first for item in report.violated if item.finding]


def test_advantages_of_each_token_have_no_subject(tmp_path):
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        record.rollouts(1, prompts=[[1]], responses=[[7, 2]], loss_mask=[[1, 1]], versions=0)
        record.trainer_logprobs(1, [[-1.0, -1.0]])
        record.advantages(1, [torch.tensor([0.5, 0.25])], estimator="gae")
    assert not report_of(read(tmp_path / "trace"), "trace").violated


@pytest.mark.parametrize(
    "wrong", [{"dtype": "float8"}, {"epsilon": -1.0}, {"epsilon": float("nan")}, {"ddof": 2}, {"ratio_over": "engine"}]
)
def test_facts_that_no_loop_can_have_are_refused(wrong, tmp_path):
    with pytest.raises(UsageError):
        verdict(tmp_path / "trace", rewards_of("shares", 2, 4, seed=1), [0.0] * 8, **wrong)


def test_an_estimator_without_rewards_is_refused(tmp_path):
    with probe.open(tmp_path / "trace", dtype="float32") as record:
        record.rollouts(1, prompts=[[1]], responses=[[7, 2]], loss_mask=[[1, 1]], versions=0)
        with pytest.raises(UsageError, match="has no rewards"):
            record.advantages(1, [0.5], estimator="grpo")
