"""The search for the largest budget, against a machine whose memory is known."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.campaign.sweep.summary import TOLERANCE, next_budget


def searched(room, **bounds):
    tried = {}
    while (budget := next_budget(tried, **bounds)) is not None:
        assert budget not in tried
        tried[budget] = budget <= room
    return tried


def largest(tried):
    return max((budget for budget, ran in tried.items() if ran), default=None)


@given(room=st.integers(1, 10**6), multiple=st.sampled_from([1, 2, 4, 8, 24]), first=st.integers(1, 64))
def test_what_is_found_is_close_to_what_fits(room, multiple, first):
    least = first * multiple
    found = largest(searched(room, least=least, most=10**7, multiple=multiple))
    if room < least:
        assert found is None
    else:
        assert found <= room <= found + max(TOLERANCE * found, multiple)


@given(room=st.integers(1, 10**6), stop=st.integers(0, 30))
def test_a_search_that_was_stopped_goes_on_as_if_it_had_not(room, stop):
    bounds = {"least": 64, "most": 10**7, "multiple": 8}
    whole = searched(room, **bounds)
    begun = dict(list(whole.items())[:stop])
    while (budget := next_budget(begun, **bounds)) is not None:
        begun[budget] = budget <= room
    assert begun == whole


@pytest.mark.parametrize(("most", "found"), [(1000, 1000), (1003, 1000), (64, 64), (10, 64)])
def test_the_greatest_budget_is_tried_and_nothing_above_it(most, found):
    assert largest(searched(10**6, least=64, most=most, multiple=8)) == found


@pytest.mark.parametrize(("room", "most_trials"), [(44_000, 8), (54_000, 8), (150_000, 10)])
def test_trials_are_few(room, most_trials):
    assert len(searched(room, least=1024, most=2**20, multiple=1)) <= most_trials
