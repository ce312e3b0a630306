"""The order is a permutation in each epoch and a function of seed and step alone; three other lines say the same."""

import hashlib
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from verifier.data.examples import batch_indices, epoch_order
from verifier.errors import UsageError

SIZES = {"num": st.integers(1, 40), "batch": st.integers(1, 50), "seed": st.integers(0, 2**63)}


def independent(num, seed, places):
    """Indices at places of the endless stream of epochs."""

    def keyed(epoch):
        names = {index: b"%d/%d/%d" % (seed, epoch, index) for index in range(num)}
        return sorted((hashlib.blake2b(name, digest_size=16).hexdigest(), index) for index, name in names.items())

    return [keyed(place // num)[place % num][1] for place in places]


@given(**SIZES, step=st.integers(0, 60))
def test_any_step_is_what_three_other_lines_say(num, batch, seed, step):
    assert list(batch_indices(num, batch, seed, step)) == independent(
        num, seed, range(step * batch, (step + 1) * batch)
    )


@given(**SIZES)
def test_every_epoch_is_a_permutation(num, batch, seed):
    stream = [index for step in range(-(-3 * num // batch)) for index in batch_indices(num, batch, seed, step)]
    for epoch in range(3):
        assert sorted(stream[epoch * num : (epoch + 1) * num]) == list(range(num))


def test_epochs_and_seeds_differ():
    orders = {epoch_order(100, seed, epoch) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_no_random_state_matters():
    random.seed(1)
    np.random.seed(1)
    before = batch_indices(1000, 64, 7, 3)
    random.random()
    np.random.rand()
    epoch_order.cache_clear()
    assert batch_indices(1000, 64, 7, 3) == before
    assert before[:5] == (744, 111, 676, 215, 158)


@pytest.mark.parametrize("arguments", [(0, 1, 1, 0), (1, 0, 1, 0), (1, 1, 1, -1)])
def test_bad_sizes_are_refused(arguments):
    with pytest.raises(UsageError, match="batch and data set need at least 1, steps count from 0"):
        batch_indices(*arguments)
