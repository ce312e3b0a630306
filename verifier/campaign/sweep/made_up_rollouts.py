"""Made-up rollouts of variable lengths that fill every micro-batch of a step to its budget."""

from __future__ import annotations

import numpy as np

from verifier.data.rollout import Rollout, make_rollout

SHORTEST = 8
"""Part of the longest rollout's length that the shortest one has."""


def lengths_of(budget: int, *, longest: int, multiple: int, seed: int) -> list[int]:
    """Draw lengths whose sum, each padded to `multiple`, is the budget.

    Args:
        budget: tokens of a micro-batch, padding included; a multiple of `multiple`.
        longest: greatest length.
        multiple: tokens that each rollout is padded to a multiple of.
        seed: of the draw.
    """
    random = np.random.default_rng([seed, budget, multiple])
    most, left = max(1, longest // multiple), budget // multiple
    lengths: list[int] = []
    while left:
        rows = min(left, int(random.integers(max(1, most // SHORTEST), most + 1)))
        lengths.append(max(1, rows * multiple - int(random.integers(multiple))))
        left -= rows
    return lengths


def made_up(budget: int, *, copies: int, longest: int, multiple: int, vocabulary: int, seed: int) -> list[Rollout]:
    """Make the rollouts of a step, which `split_by_tokens` packs into `copies` full micro-batches.

    Every micro-batch has rollouts of the same lengths: then each is filled to the last token, since rollouts go from
    the longest to the shortest, each to the emptiest micro-batch. A quarter of each rollout is its prompt. Token ids
    are below `vocabulary`; for the lengths see `lengths_of`.
    """
    random = np.random.default_rng([seed, budget])
    rollouts = []
    for number, length in enumerate(lengths_of(budget, longest=longest, multiple=multiple, seed=seed) * copies):
        tokens, prompt = random.integers(vocabulary, size=length), max(1, length // 4)
        rollouts.append(make_rollout(f"made-up {number}", tokens[:prompt], tokens[prompt:]))
    return rollouts
