"""What a rank of test_upstream_traps.py enters around its session: one default of ours taken back."""

from __future__ import annotations

import contextlib
from typing import Any

from verifier.faults.fault import Call, replaced


def without_p2p_overlap(*_: Any) -> contextlib.AbstractContextManager[None]:
    """Interleaved stages as a library user of megatron-core gets them."""

    def configure(call: Call) -> None:
        call.original()
        call.provider.overlap_p2p_comm, call.provider.batch_p2p_comm = False, True
        call.provider.variable_seq_lengths = False

    return replaced("verifier.model.provider_megatron:_configure(provider, mesh, dtype, tier)", configure)


def without_param_sync(*_: Any) -> contextlib.AbstractContextManager[None]:
    """An export that reads parameters as the optimizer left them."""
    return replaced("verifier.export.gather_megatron:params_synced(trainer)", lambda call: contextlib.nullcontext())
