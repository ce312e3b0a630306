"""Numbers that a step shows: what each is a mean of, on a batch whose answers differ in length, age and reward.

What this does not exercise: the sums over ranks (tests/dist/trainer_functions.py).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verifier.algorithms.losses import LossInputs
from verifier.algorithms.registry import LossOptions
from verifier.config.load import load
from verifier.config.training import TrainConfig
from verifier.data.recorded import RolloutRow, rollout_of
from verifier.megatron import policy_loss_megatron
from verifier.megatron.step_megatron import StepResult
from verifier.trainer import grpo_plan, loop, sampled_batch, update_facts_megatron

STEP = 3
"""Number of the step: its weights are of version 2."""


def row(name: str, group: str, tokens: int, reward: float, version: int, **others: Any) -> RolloutRow:
    """An answer of so many tokens behind a prompt of three."""
    return RolloutRow(
        id=name, group=group, prompt=(1, 2, 3), response=(5,) * tokens, sampled=(True,) * tokens,
        mask=(True,) * tokens, logprobs=tuple(-0.5 * (at + 1) for at in range(tokens)), versions=(version,) * tokens,
        reward=reward, **others,
    )  # fmt: skip


ROWS = (
    row("a", "g", 2, 1.0, 2), row("b", "g", 8, 0.0, 2, truncated=True), row("c", "h", 1, 0.0, 1),
    row("d", "h", 7, 0.0, 2),
)  # fmt: skip
NATS = {"a": 0.25, "b": -0.5, "c": 2.0, "d": 1.0}
"""Log-probability by the trainer less the engine's, of each token of an answer."""


def facts(rows: tuple[RolloutRow, ...] = ROWS) -> dict[str, Any]:
    words = ("model=tiny:add", "run=r", "algorithm=grpo", "grpo.mode=async", "grpo.max_staleness=3",
             "grpo.ratio_over=engine", "grpo.max_answer_tokens=16")  # fmt: skip
    given = [rollout_of(item) for item in rows]
    reasons = [None, "overlong", None, None]
    old = [item.logprobs + NATS[item.id] for item in given]
    return grpo_plan._facts(load(TrainConfig, overrides=words)[0], STEP, rows, given, reasons, old)


def test_a_step_shows_all_of_its_answers_those_that_leave_the_loss_too():
    found = facts()
    assert found["reward"] == 0.25
    assert found["mixed_groups"] == 0.5
    assert found["answer_tokens"] == 18 / 4
    assert found["truncated_share"] == 0.25


def test_age_is_counted_from_the_weights_that_the_step_trains():
    assert facts()["staleness"] == pytest.approx(1 / 18)


def test_mismatch_is_that_of_tokens_of_the_trained_weights_each_counted_once():
    nats = np.repeat([0.25, -0.5, 1.0], [2, 8, 7])
    found = facts()
    assert found["mismatch_max"] == pytest.approx(1.0)
    assert found["mismatch_p99"] == pytest.approx(np.quantile(np.abs(nats), 0.99))
    assert found["mismatch_k3"] == pytest.approx(np.mean(np.expm1(nats) - nats), rel=1e-6)


def test_positions_are_eighths_of_the_longest_answer_that_is_allowed():
    """Two places of sixteen each: the first has two tokens of all three answers."""
    parts = facts()["mismatch_by_position"]
    assert parts[0] == pytest.approx((2 * 0.25 + 2 * 0.5 + 2 * 1.0) / 6)
    assert parts[3] == pytest.approx((2 * 0.5 + 1.0) / 3)
    assert parts[4:] == [None] * 4


def test_tokens_are_those_of_the_batch():
    given = [rollout_of(item) for item in ROWS]
    assert grpo_plan._token_counts(given, True) == {"sampled_tokens": 18.0, "scored_tokens": 60.0}
    assert grpo_plan._token_counts(given[:2], False) == {"sampled_tokens": 10.0, "scored_tokens": 16.0}


def test_turns_are_meant_over_episodes_of_all_rounds():
    rounds = [SimpleNamespace(episodes=("x", "x", "x", "y")), SimpleNamespace(episodes=("z",))]
    assert sampled_batch.mean_turns(rounds) == 5 / 3


def test_a_step_of_several_updates_shows_their_mean_the_greatest_gap_and_all_tokens():
    reports = [
        {"loss": 1.0, "ratio_gap": 0.5, "num_tokens": 3.0, "tokens": 10.0, "peak_memory_gib": 2.0},
        {"loss": 2.0, "ratio_gap": 0.25, "num_tokens": 5.0, "tokens": 12.0, "peak_memory_gib": 3.0},
    ]
    right = {"loss": 1.5, "ratio_gap": 0.5, "num_tokens": 8.0, "tokens": 22.0, "peak_memory_gib": 3.0}
    assert loop.mean_of(reports) == right
    assert loop.mean_of([]) == {}


def test_an_update_shows_its_norm_once_and_shares_of_all_its_tokens():
    result = StepResult(loss=0.5, grad_norm=2.0, num_tokens=4)
    counted = {"clipped": 1.0, "clamped": 2.0, "kl": 0.4, "entropy": 6.0, "ratio_gap": 0.125}
    assert update_facts_megatron.metrics_of_update(result, counted, policy=True) == {
        "loss": 0.5, "grad_norm": 2.0, "num_tokens": 4, "entropy": 1.5, "clipped_share": 0.25, "clamped_share": 0.5,
        "kl": 0.1, "ratio_gap": 0.125,
    }  # fmt: skip


def test_clipped_tokens_are_those_beyond_either_bound_on_the_side_that_the_loss_clips():
    ratios = torch.tensor([0.5, 0.5, 1.0, 1.5, 1.5], dtype=torch.float64)
    inputs = LossInputs(
        current_T=ratios.log() - 1, entropy_T=torch.zeros(5), divisor_T=torch.full((5,), -1.0, dtype=torch.float64),
        advantage_T=torch.tensor([1.0, -1.0, 1.0, 1.0, -1.0]), reference_T=None,
        mask_T=torch.tensor([True] * 5), sequence_mean=lambda values_T: values_T,
    )  # fmt: skip
    options = LossOptions(clip_low=0.2, clip_high=0.2)
    assert policy_loss_megatron.loss_metrics("clipped", inputs, options).clipped_T.tolist() == [
        False, True, False, True, False
    ]  # fmt: skip
    assert policy_loss_megatron.loss_metrics("cispo", inputs, options).clipped_T.tolist() == [
        True, True, False, True, True
    ]  # fmt: skip
