"""Transfer group over gloo, and the control channel of every group; each wait has a deadline."""

from __future__ import annotations

import json
import os
import secrets
import socket
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo

from verifier.launch.channel import limited, wrapped
from verifier.launch.rank import LOOPBACK
from verifier.transport.group import BroadcastGroup
from verifier.transport.wire import Address, Agreement, TransferFailed, overdue

_HELLO_S = 5.0
"""Seconds for the hello of a member, which sends it at once: a silent stranger keeps nobody out for long."""
_PART_S = 0.2
"""The same once it has begun."""
_MAX_HELLO, _MAX_GUESTS = 64, 128
_PORT, _KEY = "control port", "control key"
"""Keys of the store: the sender's port, and the secret by which members know each other."""


class GlooGroup(BroadcastGroup):
    """A joined transfer group that moves bytes by gloo."""

    def __init__(self, store: FileStore, rank: int, address: Address) -> None:
        super().__init__()
        self.rank, self.address, self.store = rank, address, store
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self._control = ControlChannel(store, rank, address)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=self._control.host)]
        options._timeout = timedelta(seconds=address.deadline_s)
        self._group = self.tried(
            "the others to join",
            lambda: ProcessGroupGloo(PrefixStore("transfer", store), rank, address.world_size, options),
        )

    def failed(self, what: str, error: RuntimeError) -> TransferFailed:
        """See `BroadcastGroup.failed`."""
        return overdue(self.rank, self.address, what, error)

    def end_of(self, work: Any) -> None:
        """See `BroadcastGroup.end_of`."""
        work.wait(timedelta(seconds=self.address.deadline_s))

    def close(self) -> None:
        """See `TransferGroup.close`."""
        self._pending.clear()
        self._control.close()
        self._group = self.store = None


class Listener:
    """The sender's file, by which members find each other. `address` goes to the engine; `accept` waits for its ranks.

    A file and no TCPStore, which lets every user of the host read, list and write its keys.

    Args:
        num_receivers: number of the engine's ranks.
        deadline_s: of every single wait in the group, seconds.
        kind: of the transport; see `Address`.
        folder: for the file, which no other user can read; None makes one, which goes with the group.
        host: address of this host, at which the members meet.
    """

    def __init__(
        self, num_receivers: int, *, deadline_s: float, kind: str = "gloo", folder: Path | None = None,
        host: str = LOOPBACK,
    ) -> None:  # fmt: skip
        self._own = tempfile.TemporaryDirectory(prefix="verifier-transfer-") if folder is None else None
        handle, store = tempfile.mkstemp(prefix="store-", dir=self._own.name if self._own else folder)
        os.close(handle)
        self.address = Address(host=host, store=store, world_size=num_receivers + 1, deadline_s=deadline_s, kind=kind)

    def accept(self) -> GlooGroup:
        """Wait for every engine rank; raises TransferFailed after the deadline."""
        group = join(self.address, 0)
        group.folder = self._own
        return group


def join(address: Address, rank: int) -> GlooGroup:
    """Join the group of a listener.

    Args:
        address: address of the listener.
        rank: rank in the group, engine rank + 1; 0 is the sender.

    Raises:
        TransferFailed: nobody listens there, or a member did not join before the deadline.
    """
    if not os.access(address.store, os.R_OK | os.W_OK):
        raise TransferFailed(f"no sender listens at {address.store}: there is no such file")
    store = FileStore(address.store, -1)
    store.set_timeout(timedelta(seconds=address.deadline_s))
    return GlooGroup(store, rank, address)


class ControlChannel:
    """One member's end of the TCP connections for short messages, ten times faster than gloo. Not for several threads.

    Every receiver sends its message to the sender, which sends all of them back together. A wait is one read of a
    socket. Agreements end in the order in which they were proposed.

    Attributes:
        host: address of this member's host, by which it reaches the others.

    Raises:
        TransferFailed: a member did not join before the deadline.
    """

    def __init__(self, store: FileStore, rank: int, address: Address) -> None:
        self._rank, self._address, self.host = rank, address, address.host
        self._others: list[connection.Connection] = []
        """The receivers in their order; on a receiver, the sender."""
        try:
            self._others = self._accept(store) if rank == 0 else [self._connect(store)]
        except (OSError, RuntimeError) as error:
            raise overdue(rank, address, "the others to join", error) from error

    def propose(self, message: str) -> Callable[[], Agreement]:
        """Start to agree on a short message, such as a plan digest.

        Returns:
            Waits for the messages of all; every member gets the same agreement. Raises TransferFailed if a member did
            not propose its own before the deadline.
        """
        self._within(message, lambda: self._send(message))
        return lambda: Agreement(messages=tuple(json.loads(self._within(message, lambda: self._exchange(message)))))

    def close(self) -> None:
        """Leave; the others' next wait fails at once."""
        for other in self._others:
            other.close()
        self._others = []

    def _accept(self, store: FileStore) -> list[connection.Connection]:
        key, until = secrets.token_hex(16), time.monotonic() + self._address.deadline_s
        members: dict[int, connection.Connection] = {}
        guests: dict[connection.Connection, float] = {}
        """Connections that have said nothing yet -> when they are closed; no number of strangers keeps a member out."""
        with socket.create_server((self._address.host, 0), backlog=_MAX_GUESTS) as door:
            store.set(_KEY, key)
            store.set(_PORT, str(door.getsockname()[1]))
            while len(members) < self._address.world_size - 1:
                ready: list[Any] = connection.wait([door, *guests], min(_HELLO_S, max(until - time.monotonic(), 0)))
                if door in ready:
                    guests[wrapped(door.accept()[0], _PART_S)] = time.monotonic() + _HELLO_S
                for guest in [guest for guest, leaves in guests.items() if guest in ready or leaves < time.monotonic()]:
                    del guests[guest]
                    hello = _first_message(guest).split() if guest in ready else []
                    if len(hello) == 2 and secrets.compare_digest(hello[0], key.encode()):
                        members[int(hello[1])] = guest
                    else:
                        guest.close()
                if time.monotonic() > until:
                    raise TimeoutError("timed out")
            for guest in guests:
                guest.close()
        for other in members.values():
            limited(other, self._address.deadline_s)
        return [members[rank] for rank in sorted(members)]

    def _connect(self, store: FileStore) -> connection.Connection:
        address = self._address.host, int(store.get(_PORT))
        wire = socket.create_connection(address, self._address.deadline_s)
        self.host = str(wire.getsockname()[0])
        sender = wrapped(wire, self._address.deadline_s)
        sender.send_bytes(b"%s %d" % (store.get(_KEY), self._rank))
        return sender

    def _send(self, message: str) -> None:
        if self._rank != 0:
            self._others[0].send_bytes(message.encode())

    def _exchange(self, message: str) -> bytes:
        """Everyone's messages in rank order, as JSON; the sender collects them and sends them on."""
        if self._rank != 0:
            return self._others[0].recv_bytes()
        rows = json.dumps([message, *(other.recv_bytes().decode() for other in self._others)]).encode()
        for other in self._others:
            other.send_bytes(rows)
        return rows

    def _within(self, message: str, act: Callable[[], Any]) -> Any:
        what = f"all ranks to say `{message}`"
        if not self._others:
            raise TransferFailed(f"rank {self._rank} of the transfer group left it and cannot wait for {what}")
        try:
            return act()
        except (OSError, EOFError) as error:
            why = "timed out" if isinstance(error, BlockingIOError) else f"a member left the group {error}"
            raise overdue(self._rank, self._address, what, OSError(why.rstrip())) from error


def _first_message(wire: connection.Connection) -> bytes:
    """First message of a member or a stranger; empty if it leaves, keeps silent or sends too much."""
    try:
        return wire.recv_bytes(_MAX_HELLO)
    except (OSError, EOFError):
        return b""
