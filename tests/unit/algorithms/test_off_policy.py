"""Importance weights and masks: TIS and MIS by hand, -infinity, and what is refused."""

import math

import numpy as np
import pytest

from verifier.algorithms.off_policy import CorrectionOptions, correction
from verifier.errors import UsageError

RATIOS = np.array([0.25, 4.0, 1.0, 8.0])
MASK = np.array([True, True, True, False])


def corrected(ratios=RATIOS, **options) -> np.ndarray:
    """Ratios of old to engine; the product over the mask of the default ones is 1."""
    engine = np.full(4, -3.0)
    with np.errstate(divide="ignore"):
        return correction(["a"], [engine + np.log(ratios)], [engine], [MASK], CorrectionOptions(**options))[0]


@pytest.mark.parametrize(
    ("options", "factors"),
    [
        ({}, [1, 1, 1, 0]),
        ({"weight": "token"}, [0.25, 2, 1, 0]),
        ({"weight": "token", "cap": None, "mask": "token", "mask_low": 0.5, "mask_high": 2.0}, [0, 0, 1, 0]),
        ({"weight": "token", "mask": "token", "mask_high": 9.0}, [0, 2, 1, 0]),
        ({"weight": "sequence"}, [1, 1, 1, 0]),
        ({"mask": "geometric", "mask_low": 0.99, "mask_high": 1.01}, [1, 1, 1, 0]),
    ],
)
def test_factors_by_hand(options, factors):
    np.testing.assert_allclose(corrected(**options), factors, rtol=1e-14)


@pytest.mark.parametrize(("level", "expected"), [("token", 3.0), ("sequence", 27.0), ("geometric", 3.0)])
def test_levels_of_one_ratio(level, expected):
    got = corrected(np.full(4, 3.0), weight=level, cap=None)
    np.testing.assert_allclose(got, [expected] * 3 + [0], rtol=1e-14)


def test_a_cap_at_the_level_of_a_sequence_holds_for_each_of_its_tokens():
    assert corrected(np.full(4, 3.0), weight="sequence", cap=5.0).tolist() == [5, 5, 5, 0]


def test_a_token_that_the_trainer_thinks_impossible_is_finite():
    got = corrected(np.array([0.0, 1.0, 1.0, 1.0]), weight="token")
    np.testing.assert_allclose(got, [math.exp(-20), 1, 1, 0])


def test_a_token_that_both_think_impossible_has_ratio_1():
    nothing = np.array([-math.inf])
    (got,) = correction(["a"], [nothing], [nothing], [np.array([True])], CorrectionOptions(weight="token"))
    assert got.tolist() == [1]


@pytest.mark.parametrize("mask", [np.zeros(4, bool), np.array([], bool)])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_an_empty_answer_has_no_factor(mask, level):
    nothing = [np.full(len(mask), math.nan)]
    (got,) = correction(["a"], nothing, nothing, [mask], CorrectionOptions(weight=level, mask=level))
    assert not got.any()


@pytest.mark.parametrize(("which", "whose"), [(0, "old"), (1, "engine")])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_logprob_that_is_none_is_refused_by_name(which, whose, value):
    columns = [np.full(3, -1.0), np.full(3, -1.0)]
    columns[which][1] = value
    with pytest.raises(UsageError, match=f"rollout `r5`: the {whose} log-probability of token 1 is {value}"):
        correction(["r5"], columns[:1], columns[1:], [np.ones(3, bool)], CorrectionOptions())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight": "batch"}, r"the importance weight is `batch` \(known: token, sequence, geometric\)"),
        ({"mask": "batch"}, "the importance mask is `batch`"),
        ({"cap": 0.0}, "the cap of importance weights is 0.0"),
        ({"cap": math.nan}, "the cap of importance weights is nan"),
        ({"mask_low": 2.0, "mask_high": 1.0}, "keeps ratios from 2.0 to 1.0"),
    ],
)
def test_options_that_exclude_everything_are_refused(options, message):
    with pytest.raises(UsageError, match=message):
        CorrectionOptions(**options)
