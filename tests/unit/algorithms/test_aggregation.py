"""Weights of tokens: values by hand, sequences without tokens, and what is refused."""

import numpy as np
import pytest

from verifier.algorithms.aggregation import token_weights
from verifier.errors import ContractError, UsageError

MASKS = [np.array([True, False]), np.array([True] * 3), np.array([False]), np.array([], bool), np.array([True])]
PROMPTS = ["a", "a", "b", "b", "c"]


@pytest.mark.parametrize(
    ("how", "constant", "expected"),
    [
        ("token_mean", None, (1 / 5, 1 / 5, 1 / 5)),
        ("sequence_mean", None, (1 / 3, 1 / 9, 1 / 3)),
        ("prompt_mean", None, (1 / 8, 1 / 8, 1 / 2)),
        ("constant", 10, (1 / 50, 1 / 50, 1 / 50)),
    ],
)
def test_weights_by_hand(how, constant, expected):
    got = token_weights(MASKS, PROMPTS, how, constant)
    first, second, last = expected
    for own, want in zip(got, [[first, 0], [second] * 3, [0], [], [last]], strict=True):
        np.testing.assert_array_equal(own, np.array(want, float), strict=True)


@pytest.mark.parametrize(
    ("how", "constant", "message"),
    [
        ("mean", None, r"aggregation `mean` is unknown \(known: token_mean, sequence_mean, prompt_mean, constant\)"),
        ("constant", None, "needs a positive number of tokens, its constant is None"),
        ("constant", 0, "needs a positive number of tokens"),
        ("constant", float("nan"), "needs a positive number of tokens"),
        ("token_mean", 10, "`token_mean` does not use the constant 10"),
    ],
)
def test_contradictions_are_refused(how, constant, message):
    with pytest.raises(UsageError, match=message):
        token_weights(MASKS, PROMPTS, how, constant)


@pytest.mark.parametrize("masks", [[], [np.array([], bool)], [np.zeros(3, bool)]])
def test_a_batch_without_a_token_in_the_loss_is_refused(masks):
    with pytest.raises(UsageError, match="nothing to train on"):
        token_weights(masks, ["a"] * len(masks), "token_mean")


def test_lengths_that_disagree_are_an_error():
    with pytest.raises(ContractError, match="there are 5 masks and 1 prompts"):
        token_weights(MASKS, ["a"], "token_mean")
