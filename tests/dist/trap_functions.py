"""Rank functions of test_upstream_traps.py: a whole round trip with one default of ours taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verifier.faults.inject import replaced
from verifier.launch.rank import RankContext
from verifier.runs import session_megatron


def without_p2p_overlap(context: RankContext) -> dict[str, float]:
    """Interleaved stages as a library user of megatron-core gets them."""

    def make(original: Any) -> Any:
        def configure(provider: Any, *others: Any) -> None:
            original(provider, *others)
            provider.overlap_p2p_comm, provider.batch_p2p_comm = False, True
            provider.variable_seq_lengths = False

        return configure

    with replaced("verifier.model.provider_megatron:_configure", "provider, mesh, dtype, tier", make):
        return session_megatron.roundtrip(context)


def without_param_sync(context: RankContext) -> dict[str, float]:
    """An export that reads parameters as the optimizer left them."""

    @contextlib.contextmanager
    def nothing(trainer: Any) -> Iterator[None]:
        yield

    with replaced("verifier.export.gather_megatron:params_synced", "trainer", lambda original: nothing):
        return session_megatron.roundtrip(context)
