"""Probe of one weight transfer, on trainer rank 0: what each engine rank agreed to and received, and what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from verifier.core.record import Probe
from verifier.core.records_weights import PlanDigest
from verifier.probes.engine_state import record_receipt
from verifier.transport.buffer import unpack

if TYPE_CHECKING:
    import torch

    from verifier.engine.sender import Delivery
    from verifier.transport.wire import Agreement


class TransferProbe:
    """One transfer; see `verifier.engine.sender.TransferWatch`.

    Args:
        ranks: recorders by engine rank.
        version: of the weights.

    Attributes:
        sent: every tensor that the engine confirmed, by name, on the host.
    """

    def __init__(self, ranks: Sequence[Probe], version: int) -> None:
        self._ranks, self.version = ranks, version
        self.sent: dict[str, torch.Tensor] = {}

    def agreed(self, agreement: Agreement) -> None:
        """Record the plan that each engine rank holds; the first member is the sender."""
        for rank, digest in enumerate(agreement.messages[1:]):
            self._ranks[rank].emit(PlanDigest(name="chunk plan", version=self.version, digest=digest))

    def delivered(self, delivery: Delivery) -> None:
        """Record every engine rank's receipt of a chunk."""
        packed = delivery.packed
        self.sent |= {name: tensor.clone() for name, tensor in unpack(packed.chunk, packed.buffer.cpu())}
        for receipt in delivery.receipts:
            record_receipt(self._ranks[receipt.rank], receipt, self.version)
