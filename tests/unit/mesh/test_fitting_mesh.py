"""Sizes of a mesh that are left out: the smallest dp that fits."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.errors import UsageError
from verifier.mesh import Mesh

SIZES = st.integers(1, 8)


@given(tp=SIZES, cp=SIZES, ep=SIZES, etp=SIZES)
def test_default_dp_is_the_smallest_that_fits(tp, cp, ep, etp):
    dp = Mesh.fitting(tp=tp, cp=cp, ep=ep, etp=etp).dp
    assert tp * cp * dp % (ep * etp) == 0
    assert all(tp * cp * smaller % (ep * etp) for smaller in range(1, dp))


def test_the_default_dp_of_absurd_sizes_is_found_at_once():
    assert Mesh.fitting(ep=1_000_000_007, etp=999_999_937).dp == 1_000_000_007 * 999_999_937


def test_given_dp_is_taken_as_it_is():
    assert Mesh.fitting(ep=2, dp=4).dp == 4
    with pytest.raises(UsageError, match="does not divide"):
        Mesh.fitting(ep=4, dp=2)
    with pytest.raises(UsageError, match="--dp is 0, it must be at least 1"):
        Mesh.fitting(dp=0)
    with pytest.raises(UsageError, match="--tp is 0, it must be at least 1"):
        Mesh.fitting(tp=0, ep=0)
