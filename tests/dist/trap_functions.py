"""What a rank of test_upstream_traps.py enters around its session: one default of ours taken back."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from verifier.faults.inject import replaced


def without_p2p_overlap(*_: Any) -> contextlib.AbstractContextManager[None]:
    """Interleaved stages as a library user of megatron-core gets them."""

    def make(original: Any) -> Any:
        def configure(provider: Any, *others: Any) -> None:
            original(provider, *others)
            provider.overlap_p2p_comm, provider.batch_p2p_comm = False, True
            provider.variable_seq_lengths = False

        return configure

    return replaced("verifier.model.provider_megatron:_configure", "provider, mesh, dtype, tier", make)


def without_param_sync(*_: Any) -> contextlib.AbstractContextManager[None]:
    """An export that reads parameters as the optimizer left them."""

    @contextlib.contextmanager
    def nothing(trainer: Any) -> Iterator[None]:
        yield

    return replaced("verifier.export.gather_megatron:params_synced", "trainer", lambda original: nothing)
