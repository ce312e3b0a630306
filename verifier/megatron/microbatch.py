"""Assignment of rollouts to the micro-batches of data-parallel ranks.

Every rank gets the same number of micro-batches, because collectives involve all ranks. If rollouts do not suffice,
some micro-batches are empty and `pack` makes fillers of them. No rollout is dropped, repeated or split.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from verifier.data.rollout import Rollout
from verifier.errors import UsageError
from verifier.megatron.token_layout import Alignment

MicroBatches = list[list[list[int]]]
"""Per data-parallel rank and micro-batch, the indices of its rollouts."""


def split_by_count(num_rollouts: int, *, dp: int, micro_batch_size: int, multiple: int = 1) -> MicroBatches:
    """Split rollouts into micro-batches of consecutive rollouts whose sizes differ by at most one.

    `micro_batch_size` is the greatest number of rollouts of a micro-batch, and `multiple` a divisor of the number of
    micro-batches of a rank: pp for interleaved pipeline stages.

    Raises:
        UsageError: nothing to split, or a size below 1.
    """
    _check_sizes(num_rollouts, dp=dp, micro_batch_size=micro_batch_size, multiple=multiple)
    step = dp * multiple
    num_bins = -(-num_rollouts // (micro_batch_size * step)) * step
    bins = [part.tolist() for part in np.array_split(np.arange(num_rollouts), num_bins)]
    return [bins[at : at + num_bins // dp] for at in range(0, num_bins, num_bins // dp)]


def split_by_tokens(
    rollouts: Sequence[Rollout], *, dp: int, max_tokens: int, alignment: Alignment, multiple: int = 1
) -> MicroBatches:
    """Split rollouts into few, evenly filled micro-batches of at most `max_tokens` padded tokens.

    Rollouts are assigned from the longest to the shortest, each to the emptiest micro-batch. The fullest is at most 4/3
    of the optimum. Micro-batches that run at the same time on different ranks have similar sizes. `max_tokens` counts
    the rows of a pack, padding included, over all its context-parallel ranks; for `multiple` see `split_by_count`.

    Raises:
        UsageError: one rollout exceeds the budget, there is nothing to split, or a size is below 1.

    Source:
        Graham 1969, "Bounds on multiprocessing timing anomalies", theorem 2.
    """
    _check_sizes(len(rollouts), dp=dp, max_tokens=max_tokens, multiple=multiple)
    padded_S = alignment.padded(np.array([len(rollout) for rollout in rollouts]))
    budget = max_tokens // alignment.total_multiple * alignment.total_multiple
    longest = int(padded_S.argmax())
    if padded_S[longest] > budget:
        raise UsageError(
            f"rollout `{rollouts[longest].id}` takes {int(padded_S[longest]):,} tokens once padded to multiples of "
            f"{alignment.sequence_multiple}, more than the {budget:,} that a micro-batch of {max_tokens:,} holds: "
            "raise the budget or shorten the rollout"
        )
    order = np.argsort(-padded_S, kind="stable").tolist()
    sizes = padded_S.tolist()
    step = dp * multiple
    num_bins = -(-int(padded_S.sum()) // (budget * step)) * step
    while (filled := _fill(order, sizes, num_bins, budget)) is None:
        num_bins += step
    filled.sort(key=lambda item: (-item[0], item[1]))
    bins = [sorted(members) for _, members in filled]
    rounds = [bins[at : at + dp] for at in range(0, len(bins), dp)]  # dealt back and forth, for equal sums
    return [[each[rank if at % 2 == 0 else dp - 1 - rank] for at, each in enumerate(rounds)] for rank in range(dp)]


def _check_sizes(num_rollouts: int, **sizes: int) -> None:
    if num_rollouts < 1:
        raise UsageError("there are no rollouts to split into micro-batches")
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name} is {size}, it must be at least 1")


def _fill(order: list[int], sizes: list[int], num_bins: int, budget: int) -> list[tuple[int, list[int]]] | None:
    """Assign each rollout to the emptiest bin; None if that overflows, as then no bin has room."""
    members: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, at) for at in range(num_bins)]
    for index in order:
        load, at = heap[0]
        if load + sizes[index] > budget:
            return None
        members[at].append(index)
        heapq.heapreplace(heap, (load + sizes[index], at))
    return [(load, members[at]) for load, at in heap]
