"""Records of the stage `transport`: bytes from trainer to engine."""

from __future__ import annotations

from verifier.core.owed import Owed, anyone, every_engine, per_sync
from verifier.core.record import Count, Record, TensorRecord


class ReceivedTensor(TensorRecord, frozen=True, kw_only=True, tag="transport/receipt"):
    """One tensor as an engine rank received it, before its loader saw it."""

    owed = (Owed(every_engine, per_sync),)

    chunk: Count
    """Index of the chunk that brought it."""


class Handover(Record, frozen=True, kw_only=True, tag="transport/handover"):
    """End of the transfer of one version."""

    owed = (Owed(anyone, per_sync),)

    refused: str
    """Why it was refused; empty if it was not."""
