"""Rank functions of the GPU fault trials."""

from __future__ import annotations

from typing import Any

from verifier.faults.inject import replaced
from verifier.launch.rank import RankContext
from verifier.runs import session_megatron


def rank_0_shows_alone(context: RankContext) -> Any:
    """A round trip in which only trainer rank 0's description of its buffer reaches the engine."""

    def make(original: Any) -> Any:
        def show(self: Any, record: Any) -> Any:
            return original(self, record)[:1]

        return show

    with replaced("verifier.transport.cuda_ipc:Share.show", "self, record", make):
        return session_megatron.roundtrip(context)
