"""Evidence of the problems of an evaluation: which of them are questions that a run trains on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import xxhash

from verifier.config import TrainConfig
from verifier.core.record import Probe
from verifier.data.examples import Example
from verifier.stages.data.records import HeldOutRead


class DataAsRead:
    """The examples of a run as its loader read them.

    Args:
        config: of the run.
        train: examples to train on, in order.
        held_out: problems of the evaluation.
    """

    def __init__(self, config: TrainConfig, train: Sequence[Example], held_out: Sequence[Example]) -> None:
        self._config, self._train, self._held_out = config, train, held_out

    def record_held_out(self, probe: Probe, step: int) -> bool:
        """Record the problems of the evaluation, and which of them are trained on; False for none."""
        if not self._held_out:
            return False
        places: dict[int, int] = {}
        for at, example in enumerate(self._train):
            places.setdefault(_digest(example), at)
        trained = [places.get(_digest(example), -1) for example in self._held_out]
        probe.emit(
            HeldOutRead(
                name="held-out", version=step, source=self._config.data.held_out or self._config.data.source,
                ids=tuple(example.id for example in self._held_out),
            ),
            np.array(trained, np.int64),
        )  # fmt: skip
        return True


def _digest(example: Example) -> int:
    return xxhash.xxh3_64_intdigest(example.question.encode())
