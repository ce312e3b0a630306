"""A process that outlives its owner by some seconds, to end what the owner's death leaves."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from verifier.launch.child import spawn

_GRACE_S = 3.0
"""Seconds that processes have to end by themselves."""


@contextlib.contextmanager
def kept(folder: Path) -> Iterator[None]:
    """Have all processes that descend from this one now, and a folder, removed if this process is killed.

    Args:
        folder: removed after them.
    """
    theirs, ours = os.pipe()
    pids = [str(pid) for pid in descendants(os.getpid())]
    with tempfile.TemporaryFile() as log:
        keeper = spawn(
            "verifier.launch.keeper:keep", [str(theirs), str(folder), *pids], log, death_signal=0, pass_fds=[theirs]
        )
        os.close(theirs)
        try:
            yield
        finally:
            keeper.stop()  # before its pipe is closed: there is nothing for it to do
            os.close(ours)


def keep(owner_fd: str, folder: str, *pids: str) -> None:
    """Be the keeper: wait for the owner's end, then end its processes and remove its folder."""
    fds = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            fds.append(os.pidfd_open(int(pid)))
    os.read(int(owner_fd), 1)
    time.sleep(_GRACE_S)
    for fd in fds:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(fd, signal.SIGKILL)
    shutil.rmtree(folder, ignore_errors=True)


def descendants(pid: int) -> list[int]:
    """Processes that descend from one, nearest first."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found = list(children.get(pid, ()))
    for child in found:
        found += children.get(child, ())
    return found
