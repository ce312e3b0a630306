import math

import numpy as np
import pytest

from verifier.core.comparison import Tolerance, describe_difference

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("actual", "expected", "greatest", "num_not_finite", "text"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0, 0, "0/2 (0.0%)"),
        ([], [], 0.0, 0, "0/0 (0.0%)"),
        ([1.0, 2.5], [1.0, 2.0], 0.5, 0, "1/2 (50.0%); greatest abs 0.5 at [1], greatest rel 0.25 at [1]"),
        ([0.5, 2.5], [0.25, 2.0], 0.5, 0, "2/2 (100.0%); greatest abs 0.5 at [1], greatest rel 1 at [0]"),
        ([NAN, 2.0], [1.0, 2.0], 0.0, 1, "1/2 (50.0%); 1 not finite, the first at [0]"),
        ([1.0, 2.0], [1.0, NAN], 0.0, 1, "1/2 (50.0%); 1 not finite, the first at [1]"),
        ([NAN, 1.0], [NAN, 1.0], 0.0, 1, "1/2 (50.0%); 1 not finite, the first at [0]"),
        ([-INF, 1.0], [-INF, 1.0], 0.0, 1, "1/2 (50.0%); 1 not finite, the first at [0]"),
        (
            [NAN, 1.5, 3.0],
            [1.0, 1.0, 3.0],
            0.5,
            1,
            "2/3 (66.7%); greatest abs 0.5 at [1], greatest rel 0.5 at [1]; 1 not finite, the first at [0]",
        ),
    ],
)
def test_what_differs_is_counted_placed_and_never_mixed_with_what_is_not_finite(
    actual, expected, greatest, num_not_finite, text
):
    found = describe_difference(np.array(actual), np.array(expected))
    assert (found.greatest, found.num_not_finite, found.text) == (greatest, num_not_finite, text)


def test_a_place_is_an_index_of_the_whole_shape():
    actual = np.zeros((2, 3, 4), np.float16)
    actual[1, 2, 3] = 1.0
    assert "greatest abs 1 at [1, 2, 3]" in describe_difference(actual, np.zeros((2, 3, 4))).text


def test_a_tolerance_says_its_unit_and_its_source():
    assert str(Tolerance(source="a transport copies")) == "bitwise (a transport copies)"
    assert str(Tolerance(absolute=1e-5, unit="nats", source="measured")) == "1e-05 nats (measured)"
