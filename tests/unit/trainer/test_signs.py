"""Signs and the trend of the mismatch, from lines of metrics.

What this does not exercise: that a run writes them (tests/unit/trainer/test_metrics.py).
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.trainer.metrics import FEW, WINDOW, mismatch_trend, signs_of


def rows(**columns):
    """Metrics of steps, by column."""
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def test_a_reward_that_only_wobbles_is_flat():
    assert signs_of(rows(reward=[0.4, 0.5] * 10)) == ["reward is flat over 20 steps: 0.45, then 0.45"]


def test_a_reward_that_never_moves_is_flat():
    assert signs_of(rows(reward=[0.0] * 20)) == ["reward is flat over 20 steps: 0, then 0"]


def test_a_reward_that_rises_is_not_flat():
    assert signs_of(rows(reward=[0.02 * step + 0.01 * (step % 2) for step in range(20)])) == []


def test_entropy_that_halves_falls_and_slow_fall_is_no_sign():
    assert signs_of(rows(entropy=[0.9**step for step in range(20)])) == [
        "entropy falls: 0.819 to 0.169 nats in 20 steps"
    ]
    assert signs_of(rows(entropy=[0.99**step for step in range(20)])) == []


def test_groups_without_variance_are_counted():
    assert signs_of(rows(mixed_groups=[1.0, *[0.125] * 5])) == ["88% of the groups of 5 steps are without variance"]
    assert signs_of(rows(mixed_groups=[0.0] * 5 + [0.5] * 5)) == []


@given(st.lists(st.fixed_dictionaries({"reward": st.just(0.0), "entropy": st.just(0.0)}), max_size=WINDOW - 1))
def test_a_run_that_has_just_begun_has_no_sign(found):
    assert signs_of(found) == []


def trended(values):
    """Lines of a run whose p99 takes these values."""
    lines = []
    for value in values:
        line = {} if value is None else {"mismatch_p99": value}
        lines.append(line | mismatch_trend(lines[-WINDOW:], line))
    return lines


def test_the_floor_is_of_the_first_steps_and_stays():
    lines = trended([2.0, 1.0, 3.0, 2.0, 2.0, *[8.0] * 30])
    assert [line["mismatch_floor"] for line in lines[-30:]] == [2.0] * 30
    assert lines[-1]["mismatch_trend"] == 4.0
    assert signs_of(lines) == ["mismatch grows: 4 times its floor"]


def test_a_step_without_mismatch_has_neither_floor_nor_trend():
    lines = trended([None, 1.0, None])
    assert lines[0] == lines[2] == {}
    assert trended([0.0])[0] == {"mismatch_p99": 0.0, "mismatch_floor": 0.0}


@given(st.lists(st.floats(1e-9, 1e3), min_size=1, max_size=40), st.floats(1e-3, 1e3))
def test_the_trend_has_no_unit(values, scale):
    one, other = trended(values)[-1], trended([scale * value for value in values])[-1]
    assert other["mismatch_trend"] == pytest.approx(one["mismatch_trend"])
    assert other["mismatch_floor"] == pytest.approx(scale * one["mismatch_floor"])
    if len(values) <= FEW:
        assert one["mismatch_trend"] == 1.0
