"""A wait for one thing ends when a process that is watched beside it dies, and names the first kept of several."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import Pipe

import pytest

from verifier.errors import InternalError
from verifier.launch.channel import Channel, DeadlinePassed
from verifier.launch.child import Child
from verifier.launch.watchdog import Vigil


@pytest.fixture
def sleepers() -> Iterator[list[Child]]:
    command = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
    found = [Child(item.pid, item.wait) for item in [subprocess.Popen(command, start_new_session=True) for _ in "ab"]]
    yield found
    for child in found:
        child.stop()


def vigil_of(children: list[Child]) -> Vigil:
    vigil = Vigil()
    for name, child in zip("ab", children, strict=False):
        vigil.keep(child, lambda child=child, name=name: InternalError(f"{name} was {child.cause_of_death()}"))
    return vigil


def test_a_death_ends_the_wait_for_something_else_at_once(sleepers):
    ours, theirs = map(Channel, Pipe())
    vigil = vigil_of(sleepers)
    os.kill(sleepers[1].pid, signal.SIGABRT)
    began = time.monotonic()
    with pytest.raises(InternalError, match="b was killed by SIGABRT"):
        ours.receive(30, vigil)
    assert time.monotonic() - began < 5
    theirs.close()


def test_what_was_said_comes_before_the_death_and_the_first_kept_before_the_second(sleepers):
    ours, theirs = map(Channel, Pipe())
    vigil = vigil_of(sleepers)
    for child in sleepers[::-1]:
        child.send_signal(signal.SIGKILL)
        assert child.ended(10)
    theirs.send("last words")
    assert ours.receive(5, vigil) == "last words"
    with pytest.raises(InternalError, match="a was killed by SIGKILL"):
        ours.receive(5, vigil)


def test_who_is_dropped_may_end(sleepers):
    ours, theirs = map(Channel, Pipe())
    vigil = vigil_of(sleepers)
    vigil.drop(sleepers[0])
    sleepers[0].stop()
    vigil.look(0.05)
    with pytest.raises(DeadlinePassed):
        ours.receive(0.05, vigil)
    theirs.close()


def test_a_stopped_process_is_told_from_a_running_one(sleepers):
    assert not sleepers[0].stopped
    sleepers[0].send_signal(signal.SIGSTOP)
    until = time.monotonic() + 5
    while not sleepers[0].stopped and time.monotonic() < until:
        time.sleep(0.01)
    assert sleepers[0].stopped
