"""Filters: each dropped rollout has one reason."""

from verifier.algorithms.filters import DropReason, first_reasons, overlong, zero_variance

LONG, FLAT = DropReason.OVERLONG, DropReason.ZERO_VARIANCE


def test_truncated_answers_leave():
    assert overlong([False, True]) == [None, LONG]


def test_groups_without_variance_leave_and_groups_of_one_stay():
    got = zero_variance([1, 0, 1, 1, 1], ["a", "b", "a", "b", "c"])
    assert got == [FLAT, None, FLAT, None, None]


def test_trajectories_are_compared_by_their_sums():
    """Steps 0 + 1 and 1 + 0 are equal, though the steps of one index are not."""
    steps = ["s", "t", "t", "s"]
    assert zero_variance([0, 1, 0, 1], ["a"] * 4, steps) == [FLAT] * 4
    assert zero_variance([0, 1, 1, 1], ["a"] * 4, steps) == [None] * 4
    assert zero_variance([1, 1], ["a", "a"], ["t", "t"]) == [None] * 2


def test_the_first_reason_counts():
    assert first_reasons([None, LONG, None], [FLAT, FLAT, None]) == [FLAT, LONG, None]
