"""Gradients that are scaled by little more than rounding, on every rank of a run."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from verifier.faults.fault import Call, replaced

TARGET = (
    "megatron.core.distributed.distributed_data_parallel:DistributedDataParallel.scale_gradients(self, scaling_factor)"
)
TOO_LONG = 1 + 2.0**-21
"""Eight units of 2^-24, of which TRN006 allows four on one rank."""


@contextlib.contextmanager
def lengthened(*_: object) -> Iterator[None]:
    """Stand in for the scaling of gradients."""

    def body(call: Call) -> None:
        call.faulty(scaling_factor=call.scaling_factor * TOO_LONG)

    with replaced(TARGET, body):
        yield
