"""Messages, deadlines and hang-ups of a channel."""

from __future__ import annotations

import math
import os
import threading
import time
from multiprocessing import Pipe

import pytest

from verifier.launch.channel import Channel, ChannelClosed, DeadlinePassed


@pytest.fixture
def ends() -> list[Channel]:
    return [Channel(wire) for wire in Pipe()]


def test_floats_keep_every_bit(ends: list[Channel]) -> None:
    message = {"rows": [[0.1, -7.25e-30, 1e308, 3.0], [float("inf")]], "text": "a" * 3_000_000}
    threading.Thread(target=ends[0].send, args=(message,)).start()
    assert ends[1].receive(10) == message


def test_nan_arrives(ends: list[Channel]) -> None:
    ends[0].send([float("nan")])
    assert math.isnan(ends[1].receive(10)[0])


@pytest.mark.parametrize("begun", [b"", b"\0\0\0\x10half"])
def test_a_message_that_does_not_come_or_stops_is_given_up(ends: list[Channel], begun: bytes) -> None:
    os.write(ends[0].fileno(), begun)
    began = time.monotonic()
    with pytest.raises(DeadlinePassed):
        ends[1].receive(0.2)
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("begun", [b"", b"\0\0\0\x10half"])
def test_hang_up_is_noticed(ends: list[Channel], begun: bytes) -> None:
    os.write(ends[0].fileno(), begun)
    ends[0].close()
    with pytest.raises(ChannelClosed):
        ends[1].receive(5)
    with pytest.raises(ChannelClosed):
        ends[1].send("x" * 10_000_000)
