"""Probes of an engine as trainer rank 0 sees it: what each of its ranks agreed to, received and holds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from verifier.core.record import Probe
from verifier.core.records_weights import PlanDigest
from verifier.core.store import Recorder
from verifier.engine.client import EngineClient
from verifier.probes.engine import held_by, record_receipt, record_views
from verifier.transport.buffer import unpack

if TYPE_CHECKING:
    import torch

    from verifier.engine.sender import Delivery
    from verifier.transport.wire import Agreement


class EngineObserver:
    """Recorders of all engine ranks.

    Args:
        client: of the engine.
        trace: trace directory.
        num_ranks: engine ranks.

    Attributes:
        ranks: recorders by engine rank.
        refused: the last transfer was refused: layers whose weights never came are left open, and cannot score.
    """

    def __init__(self, client: EngineClient, trace: Path, num_ranks: int) -> None:
        self.client = client
        self.ranks = [Recorder(trace, "engine", rank) for rank in range(num_ranks)]
        self.refused = False

    def record_held(self, expected: Mapping[str, torch.Tensor], version: int) -> None:
        """Record what every engine rank holds: tensors, settings, and checkpoint slices beside what they must be."""
        held_by(self.client).record(self.ranks, version)
        for rank, slices in enumerate(self.client.checkpoint_view()):
            record_views(self.ranks[rank], slices, expected, version)

    def close(self) -> None:
        """Close the recorders; the client stays."""
        for recorder in self.ranks:
            recorder.close()


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
        for rank, digest in enumerate(agreement.said[1:]):
            self._ranks[rank].emit(PlanDigest(name="chunk plan", version=self.version, digest=digest))

    def delivered(self, delivery: Delivery) -> None:
        """Record every engine rank's receipt of a chunk."""
        self.sent |= {name: tensor.clone() for name, tensor in unpack(delivery.chunk, delivery.buffer.cpu())}
        for receipt in delivery.receipts:
            record_receipt(self._ranks[receipt.rank], receipt, self.version)
