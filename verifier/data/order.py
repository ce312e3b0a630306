"""Order of a data set's examples, a pure function of seed and epoch: a step's number is all that a resume needs.

The examples of an epoch are sorted by ``blake2b(f"{seed}/{epoch}/{index}", digest_size=16)``, which no library's random
numbers change. Epochs follow one another without a gap, and each step takes the next `batch_size` of them. Further
rounds of dynamic sampling have streams of their own, in which ``f"{seed}.{round}"`` stands for the seed.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache

from verifier.errors import UsageError


@lru_cache(maxsize=2)
def epoch_order(num_examples: int, seed: int | str, epoch: int) -> tuple[int, ...]:
    """All indices below `num_examples`, in the order of an epoch."""
    keys = (
        hashlib.blake2b(f"{seed}/{epoch}/{index}".encode(), digest_size=16).digest() for index in range(num_examples)
    )
    return tuple(index for _, index in sorted(zip(keys, range(num_examples), strict=True)))


def seed_of_round(seed: int, sampling_round: int) -> int | str:
    """The seed of the stream from which a round of dynamic sampling takes its prompts, rounds counted from 0."""
    return f"{seed}.{sampling_round}" if sampling_round else seed


def batch_indices(num_examples: int, batch_size: int, seed: int | str, step: int) -> tuple[int, ...]:
    """[batch_size] indices of the examples of a step, steps counted from 0.

    A batch that spans two epochs may hold an example twice.

    Raises:
        UsageError: no examples, a batch of none, or a negative step.
    """
    if num_examples < 1 or batch_size < 1 or step < 0:
        raise UsageError(
            f"no batch of {batch_size} from {num_examples} examples at step {step}: "
            "batch and data set need at least 1, steps count from 0"
        )
    places = range(step * batch_size, (step + 1) * batch_size)
    epochs = {place // num_examples for place in places}
    orders = {epoch: epoch_order(num_examples, seed, epoch) for epoch in sorted(epochs)}
    return tuple(orders[place // num_examples][place % num_examples] for place in places)
