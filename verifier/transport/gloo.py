"""Transfer group over gloo: bytes move from host to host, and every wait has a deadline."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta

import torch
from torch.distributed import BroadcastOptions, PrefixStore, ProcessGroupGloo, TCPStore

from verifier.transport.control_channel import ControlChannel
from verifier.transport.group import BroadcastGroup
from verifier.transport.wire import Address, Agreement, TransferFailed, overdue


class GlooGroup(BroadcastGroup):
    """A joined transfer group that moves bytes by gloo.

    Args:
        store: key-value store of the members.
        rank: rank in the group; 0 is the sender.
        address: address of the sender.

    Raises:
        TransferFailed: a member did not join before the deadline.
    """

    def __init__(self, store: TCPStore, rank: int, address: Address) -> None:
        super().__init__()
        self.rank, self.address, self.store = rank, address, store
        self._control = ControlChannel(store, rank, address)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address.host)]
        options._timeout = timedelta(seconds=address.deadline_s)
        self._group: ProcessGroupGloo | None = self._bounded(
            "the others to join",
            lambda: ProcessGroupGloo(PrefixStore("transfer", store), rank, address.world_size, options),
        )

    def propose(self, message: str) -> Callable[[], Agreement]:
        """See `ControlChannel.propose`."""
        return self._control.propose(message)

    def broadcast(self, buffer: torch.Tensor, what: str) -> Callable[[], None]:
        """See `BroadcastGroup.broadcast`."""
        group = self._group
        if group is None:
            raise TransferFailed(f"rank {self.rank} of the transfer group left it and cannot wait for {what}")
        options = BroadcastOptions()
        options.rootRank = 0
        work = self._bounded(what, lambda: group.broadcast([buffer], options))
        return lambda: self._bounded(what, lambda: work.wait(timedelta(seconds=self.address.deadline_s)))

    def close(self) -> None:
        """See `TransferGroup.close`."""
        self._pending.clear()
        self._control.close()
        self._group = self.store = None

    def _bounded[T](self, what: str, call: Callable[[], T]) -> T:
        try:
            return call()
        except RuntimeError as error:
            raise overdue(self.rank, self.address, what, error) from error


class Listener:
    """Listening socket of the sender. `address` goes to the engine; `accept` waits for the engine's ranks."""

    def __init__(self, num_receivers: int, *, deadline_s: float, host: str = "127.0.0.1", kind: str = "gloo") -> None:
        listening = socket.create_server((host, 0))
        port = listening.getsockname()[1]
        self.address = Address(host=host, port=port, world_size=num_receivers + 1, deadline_s=deadline_s, kind=kind)
        self._store = TCPStore(
            host,
            port,
            world_size=num_receivers + 1,
            is_master=True,
            timeout=timedelta(seconds=deadline_s),
            wait_for_workers=False,
            master_listen_fd=listening.detach(),
        )

    def accept(self) -> GlooGroup:
        """Wait for every engine rank; raises TransferFailed after the deadline."""
        return GlooGroup(self._store, 0, self.address)


def join(address: Address, rank: int) -> GlooGroup:
    """Join as an engine rank.

    Args:
        address: address of the listener.
        rank: rank in the group, engine rank + 1.

    Raises:
        TransferFailed: nobody listens there, or a member did not join before the deadline.
    """
    deadline = timedelta(seconds=address.deadline_s)
    try:
        store = TCPStore(address.host, address.port, address.world_size, False, deadline, wait_for_workers=False)
    except RuntimeError as error:
        raise TransferFailed(f"no sender listens at {address.host}:{address.port}: {error}") from error
    return GlooGroup(store, rank, address)
