"""Short words between the sender and all receivers, over TCP: each hears everyone's, ten times sooner than by gloo.

Every receiver sends its word to the sender, who sends all of them back together. A wait is one read of a socket.
"""

from __future__ import annotations

import secrets
import socket
import struct
import time
from collections.abc import Callable

from torch.distributed import TCPStore

from verifier.errors import ContractError
from verifier.transport.wire import Address, Agreement, TransferFailed, overdue

_WORD_BYTES = 96
_HELLO = struct.Struct("!16sI")
"""How a receiver begins: the sender's token, which only members know, and the receiver's rank."""
_HELLO_S = 5.0
"""For a hello after a connection is made, which a member sends at once: a silent stranger keeps nobody out for long."""
_DOOR = "control"
"""Under which name the sender's port and token stand in the store."""


class ControlChannel:
    """One member's end. Words that were said and not heard are heard in the same order. Not for several threads.

    Args:
        store: of the group's members.
        rank: in the group; 0 is the sender.
        address: the sender's.

    Raises:
        TransferFailed: a member did not join before the deadline.
    """

    def __init__(self, store: TCPStore, rank: int, address: Address) -> None:
        self._rank, self._address = rank, address
        self._others: list[socket.socket] = []
        """Of the sender: one per receiver, in their order; of a receiver: the sender."""
        try:
            if rank == 0:
                self._accept(store)
            else:
                self._connect(store)
        except (OSError, RuntimeError) as error:
            self.close()
            raise self._overdue("the others to join", error) from error

    def propose(self, word: str) -> Callable[[], Agreement]:
        """Start to agree on a word.

        Args:
            word: at most 96 ASCII bytes, such as a plan digest.

        Returns:
            Waits for everyone's word; every member sees the same agreement. Raises TransferFailed if a member did not
            say its own before the deadline.
        """
        raw = word.encode("ascii")
        if len(raw) > _WORD_BYTES:
            raise ContractError(f"a word of {len(raw)} bytes cannot be agreed on, at most {_WORD_BYTES} fit")
        what = f"all ranks to say `{word}`"
        mine = raw.ljust(_WORD_BYTES, b"\0")
        self._within(what, lambda until: self._send(mine, until) if self._rank != 0 else None)

        def heard() -> Agreement:
            rows = self._within(what, lambda until: self._hear(mine, until))
            said = (rows[at : at + _WORD_BYTES].rstrip(b"\0") for at in range(0, len(rows), _WORD_BYTES))
            return Agreement(messages=tuple(row.decode("ascii") for row in said))

        return heard

    def close(self) -> None:
        """Leave; the others' next wait fails at once."""
        for sock in self._others:
            sock.close()
        self._others = []

    def _accept(self, store: TCPStore) -> None:
        token, until = secrets.token_bytes(16), self._until()
        found: dict[int, socket.socket] = {}
        with socket.create_server((self._address.host, 0)) as door:
            store.set(_DOOR, f"{door.getsockname()[1]} {token.hex()}")
            while len(found) < self._address.world_size - 1:
                door.settimeout(_left(until))
                sock = door.accept()[0]
                rank = _greeted(sock, token, until)
                if rank is None:
                    sock.close()
                else:
                    found[rank] = sock
                    self._others.append(sock)
        self._others = [found[rank] for rank in sorted(found)]
        for sock in self._others:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _connect(self, store: TCPStore) -> None:
        port, token = store.get(_DOOR).decode("ascii").split()
        sock = socket.create_connection((self._address.host, int(port)), self._address.deadline_s)
        self._others = [sock]
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(_HELLO.pack(bytes.fromhex(token), self._rank))

    def _hear(self, mine: bytes, until: float) -> bytes:
        """Everyone's words in rank order; the sender's part is to collect and send them."""
        if self._rank != 0:
            return _read(self._others[0], _WORD_BYTES * self._address.world_size, until)
        rows = b"".join([mine, *(_read(sock, _WORD_BYTES, until) for sock in self._others)])
        self._send(rows, until)
        return rows

    def _send(self, rows: bytes, until: float) -> None:
        for sock in self._others:
            sock.settimeout(_left(until))
            sock.sendall(rows)

    def _within[T](self, what: str, act: Callable[[float], T]) -> T:
        if not self._others:
            raise TransferFailed(f"rank {self._rank} of the transfer group left it and cannot wait for {what}")
        try:
            return act(self._until())
        except OSError as error:
            raise self._overdue(what, error) from error

    def _until(self) -> float:
        return time.monotonic() + self._address.deadline_s

    def _overdue(self, what: str, error: Exception) -> TransferFailed:
        return overdue(self._rank, self._address, what, error)


def _greeted(sock: socket.socket, token: bytes, until: float) -> int | None:
    """The rank of a member that has just connected; None for a stranger: says something else, leaves or is silent."""
    try:
        said, rank = _HELLO.unpack(_read(sock, _HELLO.size, min(until, time.monotonic() + _HELLO_S)))
    except OSError:
        return None
    return rank if said == token else None


def _read(sock: socket.socket, num_bytes: int, until: float) -> bytes:
    """Exactly so many bytes."""
    found = b""
    while len(found) < num_bytes:
        sock.settimeout(_left(until))
        part = sock.recv(num_bytes - len(found))
        if not part:
            raise ConnectionError("a member of the transfer group left it")
        found += part
    return found


def _left(until: float) -> float:
    """Seconds; an overdue wait fails as one that times out."""
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError("timed out")
    return left
