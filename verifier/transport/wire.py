"""What passes between sender and receivers besides the bytes: addresses, agreements, receipts. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import starmap
from typing import Any, NamedTuple

from verifier.errors import InternalError

AHEAD = 3
"""Chunks after the one that is digested and loaded that are said: all but the last are agreed on and on their way."""
STOPPED = "stopped"
"""What a sender says in a chunk's stead when its stream departs from the plan."""


class TransferFailed(InternalError):
    """A member of the transfer group did not arrive before the deadline, or went away."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Where the sender listens. The sender is rank 0 of the group; engine rank r is rank r + 1."""

    host: str
    port: int
    world_size: int
    """The sender and all engine ranks."""
    deadline_s: float
    """For every single wait in the group."""
    kind: str = "gloo"
    """How bytes move: "gloo"; "nccl", from GPU to GPU; "ipc", out of the memory of a trainer rank on the same GPU."""

    def to_json(self) -> dict[str, Any]:
        """Keyword arguments that rebuild this address."""
        return {
            "host": self.host,
            "port": self.port,
            "world_size": self.world_size,
            "deadline_s": self.deadline_s,
            "kind": self.kind,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What every member of the group said when asked for the same thing, in group rank order (0 is the sender)."""

    said: tuple[str, ...]

    @property
    def reached(self) -> bool:
        """True when all said the same."""
        return len(set(self.said)) == 1

    @property
    def dissenters(self) -> tuple[int, ...]:
        """Group ranks that said something else than the sender."""
        return tuple(rank for rank, word in enumerate(self.said) if word != self.said[0])


class Received(NamedTuple):
    """One tensor as it arrived: what the receiver's plan calls it, and the digest of the bytes that are there."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Receipt:
    """One engine rank's confirmation of one chunk, made after loading it."""

    rank: int
    """Engine rank, from 0."""
    chunk: int
    names: tuple[str, ...]
    """Of every tensor that came, in the order of the receiver's plan; as are the next three."""
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    digests: tuple[str, ...]
    loaded: tuple[str, ...]
    """What the engine's own loader reported: its parameter names, sorted."""
    refused: str | None = None
    """Why no byte was taken, or why the loader failed, if so."""

    @property
    def received(self) -> tuple[Received, ...]:
        """The same, tensor by tensor."""
        return tuple(starmap(Received, zip(*self._columns(), strict=True)))

    def to_json(self) -> dict[str, Any]:
        """Inverse of `from_json`; tuples, which JSON writes as lists, are left as they are."""
        return {
            "rank": self.rank,
            "chunk": self.chunk,
            "received": self._columns(),
            "loaded": self.loaded,
            "refused": self.refused,
        }

    @classmethod
    def from_json(cls, record: dict[str, Any]) -> Receipt:
        """Rebuild a receipt that was sent as JSON."""
        names, dtypes, shapes, digests = record["received"]
        return cls(
            rank=record["rank"],
            chunk=record["chunk"],
            names=tuple(names),
            dtypes=tuple(dtypes),
            shapes=tuple(map(tuple, shapes)),
            digests=tuple(digests),
            loaded=tuple(record["loaded"]),
            refused=record["refused"],
        )

    def _columns(self) -> tuple[tuple[Any, ...], ...]:
        return self.names, self.dtypes, self.shapes, self.digests


def overdue(rank: int, address: Address, what: str, error: Exception) -> TransferFailed:
    """That a member waited in vain, for what, and how the wait ended."""
    who = "the engine's ranks" if rank == 0 else "the sender and the other engine ranks"
    why = str(error).splitlines()[0]
    return TransferFailed(f"transfer rank {rank} waited up to {address.deadline_s:g} s with {who} for {what}: {why}")


def chunk_word(plan_digest: str, chunk: int) -> str:
    """What all members say before a chunk moves, so that none is a chunk ahead."""
    return f"{plan_digest} chunk {chunk}"


def dissent(agreement: Agreement) -> str:
    """Why a chunk does not move, in the same words on every member."""
    if agreement.said[0] == STOPPED:
        return "the sender stopped before this chunk"
    ranks = ", ".join(str(rank - 1) for rank in agreement.dissenters)
    return f"engine rank {ranks} is at another chunk than the sender"
