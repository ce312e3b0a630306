"""Transfer group over gloo: bytes move from host to host, and every wait has a deadline."""

from __future__ import annotations

import os
import tempfile
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import FileStore, PrefixStore, ProcessGroupGloo

from verifier.transport.control_channel import ControlChannel
from verifier.transport.group import BroadcastGroup
from verifier.transport.wire import Address, TransferFailed, overdue


class GlooGroup(BroadcastGroup):
    """A joined transfer group that moves bytes by gloo.

    Args:
        store: key-value store of the members.
        rank: rank in the group; 0 is the sender.
        address: address of the sender.

    Raises:
        TransferFailed: a member did not join before the deadline.
    """

    def __init__(self, store: FileStore, rank: int, address: Address) -> None:
        super().__init__()
        self.rank, self.address, self.store = rank, address, store
        self.folder: tempfile.TemporaryDirectory[str] | None = None
        self._control = ControlChannel(store, rank, address)
        options = ProcessGroupGloo._Options()
        options._devices = [ProcessGroupGloo.create_device(hostname=address.host)]
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
        folder: folder that no other user can enter, for the file; None makes one, which goes with the group.
    """

    def __init__(
        self, num_receivers: int, *, deadline_s: float, kind: str = "gloo", folder: Path | None = None
    ) -> None:
        self._own = tempfile.TemporaryDirectory(prefix="verifier-transfer-") if folder is None else None
        handle, store = tempfile.mkstemp(prefix="store-", dir=self._own.name if self._own else folder)
        os.close(handle)
        self.address = Address(
            host="127.0.0.1", store=store, world_size=num_receivers + 1, deadline_s=deadline_s, kind=kind
        )

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
