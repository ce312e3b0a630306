"""Micro-batch schedules: balance, budgets, and what is refused."""

import numpy as np
import pytest

from verifier.data.rollout import Rollout, make_rollout
from verifier.errors import UsageError
from verifier.megatron.microbatch import split_by_count, split_by_tokens
from verifier.megatron.token_layout import Alignment


def batch(*lengths: int) -> list[Rollout]:
    return [make_rollout(f"r{at}", np.ones(length, np.int64)) for at, length in enumerate(lengths)]


def test_by_count_keeps_neighbours_and_evens_sizes() -> None:
    schedule = split_by_count(10, dp=2, micro_batch_size=3)
    assert schedule == [[[0, 1, 2], [3, 4, 5]], [[6, 7], [8, 9]]]


def test_fewer_rollouts_than_ranks_leave_empty_micro_batches() -> None:
    assert split_by_count(1, dp=2, micro_batch_size=4) == [[[0]], [[]]]
    assert split_by_tokens(batch(3), dp=2, max_tokens=8, alignment=Alignment()) == [[[0]], [[]]]


def test_by_tokens_fills_evenly() -> None:
    lengths = (8, 7, 6, 5, 4, 3, 2, 1)
    schedule = split_by_tokens(batch(*lengths), dp=2, max_tokens=10, alignment=Alignment())
    loads = [sorted(sum(lengths[index] for index in part) for part in rank) for rank in schedule]
    assert [sum(load) for load in loads] == [18, 18]
    assert max(max(load) for load in loads) <= 10


def test_padding_counts_against_the_budget() -> None:
    schedule = split_by_tokens(batch(1, 1, 1), dp=1, max_tokens=8, alignment=Alignment(cp=2))
    assert len(schedule[0]) == 2


def test_fp8_rounds_the_budget_down_to_whole_packs() -> None:
    with pytest.raises(
        UsageError, match="rollout `r0` takes 16 tokens once padded to multiples of 16, more than the 0"
    ):
        split_by_tokens(batch(1), dp=1, max_tokens=127, alignment=Alignment(fp8="blockwise"))


def test_a_rollout_beyond_the_budget_is_named() -> None:
    with pytest.raises(UsageError, match=r"rollout `r1` takes 1,200 tokens once padded .* raise the budget or shorten"):
        split_by_tokens(batch(3, 1199, 5), dp=1, max_tokens=1198, alignment=Alignment(tp=2))


def test_interleaved_stages_get_a_multiple() -> None:
    assert len(split_by_count(3, dp=1, micro_batch_size=1, multiple=2)[0]) == 4
    assert len(split_by_tokens(batch(4, 4, 4), dp=1, max_tokens=4, alignment=Alignment(), multiple=2)[0]) == 4


@pytest.mark.parametrize("sizes", [{"dp": 0}, {"micro_batch_size": 0}, {"multiple": 0}])
def test_sizes_below_one_are_refused(sizes: dict) -> None:
    with pytest.raises(UsageError, match=f"{next(iter(sizes))} is 0, it must be at least 1"):
        split_by_count(4, **{"dp": 1, "micro_batch_size": 1, **sizes})


def test_nothing_to_split_is_refused() -> None:
    with pytest.raises(UsageError, match="there are no rollouts to split"):
        split_by_count(0, dp=1, micro_batch_size=1)
    with pytest.raises(UsageError, match="there are no rollouts to split"):
        split_by_tokens([], dp=1, max_tokens=1, alignment=Alignment())
