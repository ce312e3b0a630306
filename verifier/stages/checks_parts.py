"""Rollouts of the ranks of a recorded loop: one batch, of which each rank has a part."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

import numpy as np

from verifier.core import ragged
from verifier.core.check import LOOP
from verifier.core.trace import Trace
from verifier.stages.pack.records import Rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Rollouts of one rank, or of several that have the same ones, as those of tensor parallelism have."""

    ranks: frozenset[int]
    groups: tuple[str, ...]
    masks: tuple[np.ndarray, ...]
    """[L] bool of each rollout: tokens in the loss."""

    @property
    def num_tokens(self) -> int:
        """Tokens in the loss."""
        return sum(int(mask.sum()) for mask in self.masks)


def parts_of(trace: Trace, version: int) -> list[Part]:
    """Parts of the batch of a step of a recorded loop; none of another run, whose controller has the whole batch."""
    found: dict[tuple[tuple[str, ...], bytes, int], list[Rollouts]] = defaultdict(list)
    for item in trace.of(Rollouts, version=version) if trace.manifest.command == LOOP else ():
        found[item.ids, trace.array(item, "tokens").tobytes(), -1 if item.ids else item.rank].append(item)
    return [
        Part(
            ranks=frozenset(item.rank for item in items), groups=items[0].groups,
            masks=tuple(ragged.split(trace.array(items[0], "mask").astype(bool), items[0].lengths)),
        )
        for items in found.values()
    ]  # fmt: skip
