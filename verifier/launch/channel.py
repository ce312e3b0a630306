"""JSON messages over a connection of `multiprocessing`. Its own `send` and `recv` pickle, and are never used."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Sequence
from multiprocessing import Pipe, connection
from typing import IO, TYPE_CHECKING, Any

from verifier.launch.child import Child, spawn

if TYPE_CHECKING:
    from verifier.launch.watchdog import Vigil

JSON = Any


class ChannelClosed(Exception):
    """The other side went away."""


class DeadlinePassed(Exception):
    """No whole message came in time; the channel cannot be used again."""


class Channel:
    """One end of a stream socket. Not for several threads."""

    def __init__(self, wire: connection.Connection) -> None:
        self.wire = wire

    def send(self, message: JSON) -> None:
        """Send one JSON value; floats keep every bit.

        Raises:
            ChannelClosed: the other side went away.
            DeadlinePassed: it took too long to read, see `limited`.
        """
        raw = json.dumps(message, separators=(",", ":")).encode()
        try:
            self.wire.send_bytes(raw)
        except BlockingIOError as error:
            raise DeadlinePassed from error
        except OSError as error:
            raise ChannelClosed(str(error)) from error

    def receive(self, deadline_s: float | None = None, vigil: Vigil | None = None) -> JSON:
        """Receive one JSON value.

        `deadline_s` is until the message begins, and between any two parts of it; None: no limit. The death of a
        process of `vigil` ends the wait with its error.

        Raises:
            ChannelClosed: the other side went away.
            DeadlinePassed: the message did not come, or stopped in its middle.
        """
        try:
            if deadline_s is not None:
                wait = connection.wait if vigil is None else vigil.wait
                if not wait([self.wire], max(deadline_s, 0)):
                    raise DeadlinePassed
                limited(self.wire, deadline_s)
            return json.loads(self.wire.recv_bytes())
        except BlockingIOError as error:
            raise DeadlinePassed from error
        except (EOFError, OSError) as error:
            raise ChannelClosed(str(error) or "end of stream") from error

    def fileno(self) -> int:
        """File descriptor of the socket."""
        return self.wire.fileno()

    def close(self) -> None:
        """Close this end; the other side's next wait fails at once."""
        self.wire.close()


def limited(wire: connection.Connection, deadline_s: float, option: int = socket.SO_RCVTIMEO) -> None:
    """Let every single read of a socket, or write by SO_SNDTIMEO, fail with BlockingIOError after so many seconds.

    Source:
        socket(7): they hold for the socket, whichever descriptor it is used through; 0 means no limit.
    """
    whole, part = divmod(max(deadline_s, 0.001), 1)
    with socket.socket(fileno=os.dup(wire.fileno())) as same:
        same.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", int(whole), int(part * 1e6)))


def wrapped(sock: socket.socket, deadline_s: float) -> connection.Connection:
    """The connection of a TCP socket, whose every read ends within the deadline; nothing waits to be sent with more."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(True)
    wire = connection.Connection(sock.detach())
    limited(wire, deadline_s)
    return wire


def spawned(function: str, arguments: Sequence[str], log: IO[bytes], **options: Any) -> tuple[Child, Channel]:
    """Call a function as `spawn` does, with the descriptor of the other end of a channel before its arguments."""
    ours, theirs = Pipe()
    with theirs:
        child = spawn(function, [str(theirs.fileno()), *arguments], log, pass_fds=[theirs.fileno()], **options)
    return child, Channel(ours)
