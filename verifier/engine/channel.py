"""Length-prefixed JSON over a stream socket, every wait with a deadline. Torch-free."""

from __future__ import annotations

import json
import socket
import struct
import time
from typing import Any

_PREFIX = struct.Struct("!Q")


class ChannelClosed(Exception):
    """The other side went away."""


class DeadlinePassed(Exception):
    """Nothing complete came in time; the channel cannot be used again."""


def send(sock: socket.socket, message: Any) -> None:
    """Send one JSON value; floats keep every bit.

    Raises:
        ChannelClosed: the other side went away.
    """
    raw = json.dumps(message, separators=(",", ":")).encode()
    try:
        sock.settimeout(None)
        sock.sendall(_PREFIX.pack(len(raw)) + raw)
    except OSError as error:
        raise ChannelClosed(str(error)) from error


def receive(sock: socket.socket, deadline_s: float | None) -> Any:
    """Receive one JSON value.

    Args:
        sock: connected.
        deadline_s: for the whole message; None waits until the other side closes.

    Raises:
        ChannelClosed: the other side went away.
        DeadlinePassed: the message was not complete in time.
    """
    until = None if deadline_s is None else time.monotonic() + deadline_s
    (size,) = _PREFIX.unpack(_read(sock, _PREFIX.size, until))
    return json.loads(_read(sock, size, until))


def _read(sock: socket.socket, size: int, until: float | None) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        try:
            if until is None:
                sock.settimeout(None)
            elif (left := until - time.monotonic()) > 0:
                sock.settimeout(left)
            else:
                raise DeadlinePassed
            part = sock.recv(min(size - len(parts), 1 << 20))
        except TimeoutError as error:
            raise DeadlinePassed from error
        except OSError as error:
            raise ChannelClosed(str(error)) from error
        if not part:
            raise ChannelClosed("end of stream")
        parts += part
    return bytes(parts)
