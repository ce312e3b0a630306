"""One recorded fact, and the protocol by which rooms report facts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from verifier.core.stage import Stage

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """One immutable fact: who saw what, when, with which content digest. Never an opinion."""

    stage: Stage
    kind: str
    """What sort of fact within the stage: "tensor", "expected", "plan", "receipt", "logprob", ..."""
    name: str
    """Canonical name: checkpoint spelling of a tensor, Megatron spelling of a shard, or a sequence id."""
    version: int = 0
    """Weight version that the fact belongs to; 0 is the initial checkpoint."""
    rank: int = 0
    role: str = "trainer"
    """Whose rank: "trainer", "engine", "oracle" or "source"."""
    digest: str | None = None
    """Content digest of the raw bytes (``algorithm:hex``); equal contents have equal digests."""
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Small JSON values."""
    array: str | None = None
    """Key of a payload array stored beside the trace."""


class Probe(Protocol):
    """What a room is given to report with. A probe only looks: it never changes or delays what passes."""

    def emit(self, evidence: Evidence, array: torch.Tensor | None = None) -> None:
        """Record one fact, with an optional payload array."""
