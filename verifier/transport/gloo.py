"""The transfer group of one sender (rank 0) and all engine ranks, over gloo, every wait with a deadline."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore, Work

from verifier.errors import ContractError
from verifier.transport.wire import Address, Agreement, TransferFailed

_WORD_BYTES = 96


class GlooGroup:
    """A joined transfer group. Not for several threads."""

    def __init__(self, store: TCPStore, rank: int, address: Address) -> None:
        self.rank = rank
        self.address = address
        self.store = store
        """Where a group of the same members finds them."""
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address.host)]
        options._timeout = timedelta(seconds=address.deadline_s)
        self._group = self._bounded(
            "the others to join",
            lambda: ProcessGroupGloo(PrefixStore("transfer", store), rank, address.world_size, options),
        )

    def agree(self, word: str) -> Agreement:
        """All-gather one short word and hand everyone all answers: every member sees the same agreement.

        Args:
            word: at most 96 ASCII bytes, such as a plan digest.

        Raises:
            TransferFailed: a member did not answer before the deadline.
        """
        raw = word.encode("ascii")
        if len(raw) > _WORD_BYTES:
            raise ContractError(f"a word of {len(raw)} bytes cannot be agreed on, at most {_WORD_BYTES} fit")
        mine = torch.zeros(_WORD_BYTES, dtype=torch.uint8)
        mine[: len(raw)] = torch.tensor(list(raw), dtype=torch.uint8)
        everyone = [torch.empty_like(mine) for _ in range(self.address.world_size)]
        self._wait(f"all ranks to say `{word}`", lambda: self._group.allgather([everyone], [mine]))
        return Agreement(said=tuple(bytes(item.tolist()).rstrip(b"\0").decode("ascii") for item in everyone))

    def broadcast(self, buffer: torch.Tensor, what: str) -> None:
        """From rank 0 to all, in place.

        Args:
            buffer: [num_bytes] uint8, the same size everywhere.
            what: names the content in the error.

        Raises:
            TransferFailed: a member did not arrive before the deadline.
        """
        options = BroadcastOptions()
        options.rootRank = 0
        self._wait(what, lambda: self._group.broadcast([buffer], options))

    def send(self, buffer: torch.Tensor, what: str) -> None:
        """From rank 0 to all; see `broadcast`. A buffer on a GPU goes by way of the host."""
        self.broadcast(buffer.cpu(), what)

    def receive(self, num_bytes: int, what: str) -> torch.Tensor:
        """What rank 0 sends, as [num_bytes] uint8 in fresh memory of the host; see `broadcast`."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        self.broadcast(buffer, what)
        return buffer

    def close(self) -> None:
        """Leave the group; the others' next wait fails at once."""
        self._group = None
        self.store = None

    def _wait(self, what: str, start: Callable[[], Work]) -> None:
        if self._group is None:
            raise TransferFailed(f"rank {self.rank} of the transfer group left it and cannot wait for {what}")
        self._bounded(what, lambda: start().wait(timedelta(seconds=self.address.deadline_s)))

    def _bounded[T](self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:
            who = "the engine's ranks" if self.rank == 0 else "the sender and the other engine ranks"
            raise TransferFailed(
                f"transfer rank {self.rank} waited up to {self.address.deadline_s:g} s with {who} for {what}: "
                f"{str(error).splitlines()[0]}"
            ) from error


class Listener:
    """The sender's open door: `address` is handed to the engine, then `accept` waits for its ranks."""

    def __init__(self, num_receivers: int, *, deadline_s: float, host: str = "127.0.0.1", kind: str = "gloo") -> None:
        door = socket.create_server((host, 0))
        port = door.getsockname()[1]
        self.address = Address(host=host, port=port, world_size=num_receivers + 1, deadline_s=deadline_s, kind=kind)
        self._store = TCPStore(
            host,
            port,
            world_size=num_receivers + 1,
            is_master=True,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,
            master_listen_fd=door.detach(),
        )

    def accept(self) -> GlooGroup:
        """Wait for every engine rank; TransferFailed after the deadline."""
        return GlooGroup(self._store, 0, self.address)


def join(address: Address, rank: int) -> GlooGroup:
    """Join as an engine rank.

    Args:
        address: the listener's.
        rank: in the group: engine rank + 1.

    Raises:
        TransferFailed: nobody listens there, or a member did not join before the deadline.
    """
    deadline = timedelta(seconds=address.deadline_s)
    try:
        store = TCPStore(address.host, address.port, address.world_size, False, deadline, wait_for_workers=False)
    except RuntimeError as error:
        raise TransferFailed(f"no sender listens at {address.host}:{address.port}: {error}") from error
    return GlooGroup(store, rank, address)
