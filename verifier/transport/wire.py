"""Messages of sender and receivers besides the bytes: addresses, agreements, receipts. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from verifier.errors import InternalError

AHEAD = 3
"""Number of chunks proposed beyond the one that is being loaded; all but the last are agreed on and being sent."""
STOPPED = "stopped"
"""Message of a sender, instead of a chunk's, when its stream departs from the plan."""


class TransferFailed(InternalError):
    """A member of the transfer group failed or did not arrive before the deadline."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """Address of the sender. The sender is rank 0 of the group; engine rank r of all engines is rank r + 1."""

    host: str
    store: str
    """File by which the members find each other, which no other user can read."""
    world_size: int
    """Number of members: the sender and all engine ranks."""
    deadline_s: float
    """Deadline of every single wait in the group, seconds."""
    first: int = 0
    """Engine rank of the engine's first one, where several engines are in the group."""
    kind: str = "gloo"
    """Transport of the bytes: "gloo"; "nccl", from GPU to GPU; "ipc", reading a trainer rank's memory on one GPU."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """The messages of one exchange, in the order of group ranks; the sender's is the first."""

    messages: tuple[str, ...]

    @property
    def reached(self) -> bool:
        """True if all members sent the same message."""
        return len(set(self.messages)) == 1

    @property
    def dissenters(self) -> tuple[int, ...]:
        """Group ranks whose message differs from the sender's."""
        return tuple(rank for rank, message in enumerate(self.messages) if message != self.messages[0])


class Received(NamedTuple):
    """One received tensor: its name in the receiver's plan and the digest of the received bytes."""

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
    """Index of the chunk in the plan."""
    names: tuple[str, ...] = ()
    """Names of the received tensors, in the order of the receiver's plan."""
    dtypes: tuple[str, ...] = ()
    """Dtypes of the received tensors."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes of the received tensors."""
    digests: tuple[str, ...] = ()
    """Digests of the received tensors, taken before the loader saw them."""
    loaded: tuple[str, ...] = ()
    """Parameter names reported by the engine's loader, sorted."""
    refused: str | None = None
    """Reason why no byte was taken or why the loader failed; None if neither."""

    @property
    def received(self) -> tuple[Received, ...]:
        """The received tensors one by one."""
        columns = zip(self.names, self.dtypes, self.shapes, self.digests, strict=True)
        return tuple(Received(*values) for values in columns)


def overdue(rank: int, address: Address, what: str, error: Exception) -> TransferFailed:
    """Return the error of a member whose wait for `what` failed with `error`."""
    who = "the engine's ranks" if rank == 0 else "the sender and the other engine ranks"
    why = str(error).splitlines()[0]
    return TransferFailed(f"transfer rank {rank} waited up to {address.deadline_s:g} s with {who} for {what}: {why}")


def chunk_message(plan_digest: str, chunk: int) -> str:
    """Return the message that every member sends before a chunk moves."""
    return f"{plan_digest} chunk {chunk}"


def disagreement(agreement: Agreement) -> str:
    """Return why a chunk does not move, the same sentence on every member."""
    if agreement.messages[0] == STOPPED:
        return "the sender stopped before this chunk"
    ranks = ", ".join(str(rank - 1) for rank in agreement.dissenters)
    return f"engine rank {ranks} is at another chunk than the sender"
