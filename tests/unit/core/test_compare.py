"""Sentences that follow from subject, sides and what is allowed, and the places that records give.

What this does not exercise: the texts of single checks (tests/snapshots/test_check_snapshots.py).
"""

import math

import numpy as np
import pytest

from verifier.core.check import Check
from verifier.core.compare import At, compare_array, compare_set, compare_text, compare_value
from verifier.core.comparison import Comparison, Tolerance
from verifier.core.stage import Stage
from verifier.stages.train.records import PreviousStep

AT = At(Stage.LOSS, 3, "trainer rank 1")
HALF = Tolerance(absolute=0.5, unit="nats", source="a test")


def test_two_values_make_a_sentence_with_who_says_each():
    found = compare_value(AT, "number of tokens", 1200, 1201, says=("the trainer", "the batch"))
    assert found.sentence == "the number of tokens is 1,200 (the trainer), it should be 1,201 (the batch)"
    assert (found.same, found.stage, found.version, found.owner) == (False, Stage.LOSS, 3, "trainer rank 1")
    assert (found.actual, found.expected, found.badness, found.share) == (
        "1,200 (the trainer)",
        "1,201 (the batch)",
        1.0,
        None,
    )


def test_a_name_is_its_own_subject():
    assert compare_value(AT, "layer.weight", None, (4, 2)).sentence == "`layer.weight` is absent, it should be [4, 2]"


@pytest.mark.parametrize(
    ("actual", "same", "share"), [(1.5, True, 1.0), (1.75, False, 1.5), (math.nan, False, math.inf), (1.0, True, 0.0)]
)
def test_two_numbers_are_held_against_a_bound(actual, same, share):
    found = compare_value(AT, "loss", actual, 1.0, allowed=HALF)
    assert (found.same, found.share, found.allowed) == (same, share, "0.5 nats (a test)")


def test_a_distance_is_held_against_its_bound():
    assert compare_value(AT, "gap", 0.75, None, allowed=HALF).sentence == "`gap` is 0.75, it should be at most 0.5"
    assert compare_value(AT, "gap", 0.25, None, allowed=HALF).same


def test_a_bound_of_this_comparison_is_said_before_its_tolerance():
    assert compare_value(AT, "loss", 4.0, 1.0, allowed=HALF, bound=2.0).allowed == "2, 0.5 nats (a test)"


def test_a_record_gives_stage_version_and_the_rank_that_holds_it():
    found = compare_value(PreviousStep(name="a", version=2, rank=1, updated=True, here=True), "x", 1, 2)
    assert (found.stage, found.version, found.owner) == (Stage.TRAIN, 2, "trainer rank 1")
    assert compare_value(PreviousStep(name="a", role="controller", updated=True, here=True), "x", 1, 2).owner == ""


def test_texts_are_the_same_however_they_are_composed():
    assert compare_text(AT, "text", "e\u0301", "\u00e9").same
    assert compare_text(AT, "text", "a" * 99, "b", subject="it").sentence == f"it is `{'a' * 60}`, it should be `b`"


def test_an_array_differs_by_a_bit_and_names_the_first_element():
    right = np.array([1.0, 0.0, 2.0], np.float32)
    found = compare_array(AT, "biases", np.array([1.0, -0.0, 4.0], np.float32), right, "expert")
    assert found.sentence == "`biases` at expert 1 is -0, it should be 0"
    assert (found.same, found.badness, found.actual) == (False, 2 / 3, "-0")
    assert compare_array(AT, "biases", np.array([np.nan], np.float32), np.array([np.nan], np.float32)).same


def test_a_set_names_the_first_of_each_kind_that_is_wrong():
    found = compare_set(AT, "names", ["a", "c", "c", "d"], ["a", "b", "c"], subject="the names")
    assert found.sentence == ("the names: 4 (`b` missing; `d` surplus; `c` repeated), there should be 3")
    assert compare_set(AT, "names", ["a", "b"], ["b", "a"]).same


def test_a_set_is_empty_by_default():
    assert compare_set(AT, "left", [], subject="tensors left").same
    found = compare_set(AT, "left", ["a", "b"], subject="tensors left")
    assert found.sentence == "tensors left: 2 (`a` and 1 more), there should be none"


def test_a_page_says_what_a_comparison_leaves_out():
    page = """Nothing is wrong.

    What it checks: a number.
    Tolerance and its source: exact; it is copied. Of a bound nothing.
    Where to look: the copy, and
    what comes after.
    What it does not catch: the rest.
    """
    item = Check(code="AAA001", name="a", needs=(), fn=lambda trace: iter(()), page=page)
    found = item.completed(Comparison(what="a", same=False, stage=Stage.LOSS))
    assert (found.allowed, found.hint) == ("exact; it is copied", "look at the copy, and what comes after")
    own = Comparison(what="a", same=False, stage=Stage.LOSS, allowed="2", hint="look up")
    assert item.completed(own) == own
