"""What ranks of the GPU fault trials enter around their session."""

from __future__ import annotations

import contextlib
from typing import Any

from verifier.faults.inject import replaced


def rank_0_shows_alone(*_: Any) -> contextlib.AbstractContextManager[None]:
    """Only trainer rank 0's description of its buffer reaches the engine."""

    def make(original: Any) -> Any:
        def exchange(self: Any, record: Any) -> Any:
            return original(self, record)[:1]

        return exchange

    return replaced("verifier.transport.cuda_ipc:TrainerRounds.exchange", "self, record", make)
