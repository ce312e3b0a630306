"""Framing, deadlines and hang-ups of the engine's socket."""

from __future__ import annotations

import math
import socket
import threading
import time

import pytest

from verifier.engine import channel


def test_floats_keep_every_bit() -> None:
    near, far = socket.socketpair()
    message = {"rows": [[0.1, -7.25e-30, 1e308, 3.0], [float("inf")]], "text": "a" * 3_000_000}
    threading.Thread(target=channel.send, args=(near, message)).start()
    assert channel.receive(far, 10) == message


def test_nan_arrives() -> None:
    near, far = socket.socketpair()
    channel.send(near, [float("nan")])
    assert math.isnan(channel.receive(far, 10)[0])


def test_deadline_covers_the_whole_message() -> None:
    near, far = socket.socketpair()
    near.sendall(b"\0\0\0\0\0\0\0\x10half")
    begun = time.monotonic()
    with pytest.raises(channel.DeadlinePassed):
        channel.receive(far, 0.2)
    assert time.monotonic() - begun < 2


def test_hang_up_is_told() -> None:
    near, far = socket.socketpair()
    near.close()
    with pytest.raises(channel.ChannelClosed):
        channel.receive(far, 5)
    with pytest.raises(channel.ChannelClosed):
        channel.send(far, "x" * 10_000_000)
