"""Signals that ask a process for its end."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from verifier.errors import Stopped

_AGAIN_S = 0.05
"""Seconds after which a signal comes again that was lost."""


def stop_at(*asked: int, before: Callable[[], object] = lambda: None) -> None:
    """Have these signals call `before` and raise `Stopped`; a second one ends the process there and then.

    Python drops what is raised in a finalizer, or in a callback of C. The signal then comes again until it is obeyed.

    Source:
        sys.unraisablehook of CPython.
    """
    others = sys.unraisablehook

    def listen() -> None:
        for item in asked:
            signal.signal(item, stop)

    def stop(signum: int, frame: object) -> None:
        for item in asked:
            signal.signal(item, signal.SIG_DFL)
        before()
        raise Stopped(signum)

    def drop(dropped: Any) -> None:
        if isinstance(dropped.exc_value, Stopped):
            listen()
            threading.Timer(_AGAIN_S, os.kill, (os.getpid(), dropped.exc_value.signum)).start()
        else:
            others(dropped)

    sys.unraisablehook = drop
    listen()
