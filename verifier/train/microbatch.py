"""Which rollouts go into which micro-batch of which data-parallel rank.

Every rank gets the same number of micro-batches, since a collective of one rank waits for all; where rollouts do not
suffice a micro-batch is empty and `pack` makes a filler of it. No rollout is dropped, repeated or split.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from verifier.data.rollout import Rollout
from verifier.errors import UsageError
from verifier.train.token_layout import Alignment


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Indices of rollouts: per data-parallel rank, per micro-batch."""

    ranks: tuple[tuple[tuple[int, ...], ...], ...]

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of each rank."""
        return len(self.ranks[0])

    def of(self, dp_rank: int, rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
        """The rollouts of one rank's micro-batches, in order."""
        return [[rollouts[index] for index in batch] for batch in self.ranks[dp_rank]]


def split_by_count(num_rollouts: int, *, dp: int, micro_batch_size: int, multiple: int = 1) -> Schedule:
    """Micro-batches of at most so many rollouts, neighbours together, sizes differing by one at the most.

    Args:
        num_rollouts: rollouts of the whole step.
        dp: data-parallel ranks.
        micro_batch_size: rollouts per micro-batch at the most.
        multiple: micro-batches per rank are a multiple of it: pp when virtual pipeline stages interleave.

    Raises:
        UsageError: nothing to split, or a size below 1.
    """
    _check_sizes(num_rollouts, dp=dp, micro_batch_size=micro_batch_size, multiple=multiple)
    step = dp * multiple
    num_bins = -(-num_rollouts // (micro_batch_size * step)) * step
    bins = [tuple(part.tolist()) for part in np.array_split(np.arange(num_rollouts), num_bins)]
    return _deal(bins, dp)


def split_by_tokens(
    rollouts: Sequence[Rollout], *, dp: int, max_tokens: int, alignment: Alignment, multiple: int = 1
) -> Schedule:
    """Micro-batches of at most so many padded tokens, evenly filled, in as few as greedy filling allows.

    The longest rollout goes first, each into the emptiest micro-batch (longest processing time first: the fullest is
    at most 4/3 of the least possible). Micro-batches that run at the same time on different ranks are alike in size.

    Args:
        rollouts: of the whole step.
        dp: data-parallel ranks.
        max_tokens: rows of a pack at the most, padding included, over all context-parallel ranks together.
        alignment: to what sub-sequences and packs are padded.
        multiple: micro-batches per rank are a multiple of it: pp when virtual pipeline stages interleave.

    Raises:
        UsageError: a rollout alone exceeds the budget (names it), nothing to split, or a size below 1.

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
    return _deal([tuple(sorted(members)) for _, members in filled], dp, interleaved=True)


def _check_sizes(num_rollouts: int, **sizes: int) -> None:
    if num_rollouts < 1:
        raise UsageError("there are no rollouts to split into micro-batches")
    for name, size in sizes.items():
        if size < 1:
            raise UsageError(f"{name} is {size}, it must be at least 1")


def _fill(order: list[int], sizes: list[int], num_bins: int, budget: int) -> list[tuple[int, list[int]]] | None:
    """Give each rollout to the emptiest bin; None if one overflows, since then no other bin has room either."""
    members: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, at) for at in range(num_bins)]
    for index in order:
        load, at = heap[0]
        if load + sizes[index] > budget:
            return None
        members[at].append(index)
        heapq.heapreplace(heap, (load + sizes[index], at))
    return [(load, members[at]) for load, at in heap]


def _deal(bins: list[tuple[int, ...]], dp: int, *, interleaved: bool = False) -> Schedule:
    """Share bins out over ranks: runs of neighbours, or, interleaved, back and forth so that ranks get equal sums."""
    per_rank = len(bins) // dp
    if not interleaved:
        return Schedule(ranks=tuple(tuple(bins[rank * per_rank : (rank + 1) * per_rank]) for rank in range(dp)))
    rounds = [bins[at * dp : (at + 1) * dp] for at in range(per_rank)]
    return Schedule(
        ranks=tuple(
            tuple(batch[rank] if at % 2 == 0 else batch[dp - 1 - rank] for at, batch in enumerate(rounds))
            for rank in range(dp)
        )
    )
