import math

import numpy as np
import pytest

from verifier.core.comparison import Comparison, Tolerance, describe_difference
from verifier.core.stage import Stage

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


def test_places_are_in_the_order_of_the_data_flow():
    flow = [
        (0, Stage.LOAD), (0, Stage.PACK), (0, Stage.LOGPROB), (0, Stage.EXPORT), (0, Stage.ROLLOUT),
        (0, Stage.LOSS), (0, Stage.TRAIN),  # of the idle step
        (1, Stage.PACK), (1, Stage.LOSS), (1, Stage.TRAIN), (1, Stage.LOGPROB), (1, Stage.EXPORT), (1, Stage.ROLLOUT),
        (2, Stage.LOSS),
    ]  # fmt: skip
    found = [Comparison(what="", same=False, stage=stage, version=version) for version, stage in flow]
    assert sorted(found, key=lambda item: item.place) == found
