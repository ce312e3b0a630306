"""Who is measured takes turns: a lock on a file that `lanes.py` holds until nothing else runs."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

TURN = "VERIFIER_GPU_TURN"
"""Environment variable: the file to lock; without it nobody else runs."""
WAIT_S = 1200.0


@contextmanager
def alone() -> Iterator[None]:
    """Wait for one's turn, and keep it until the end of the block.

    Raises:
        TimeoutError: others went on for longer than `WAIT_S`.
    """
    path = os.environ.get(TURN)
    if path is None:
        yield
        return
    until = time.monotonic() + WAIT_S
    with Path(path).open("r+") as turn:
        while True:
            try:
                fcntl.flock(turn, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > until:
                    raise TimeoutError(f"the other GPU tests went on for {WAIT_S:g} s") from None
                time.sleep(0.1)
        yield
