"""Injecting and healing a fault inside an engine's worker process; called through `Engine.call`."""

from __future__ import annotations

import contextlib
from typing import Any

from verifier.faults.catalog import CATALOG
from verifier.faults.fault import Fired


def inject(worker: Any, fault_id: str) -> bool:
    """Enter the fault's context in this process and leave it open until `heal`."""
    fired = Fired()
    stack = contextlib.ExitStack()
    stack.enter_context(CATALOG[fault_id].inject(fired))
    worker.verifier_fault = (stack, fired)
    return True


def heal(worker: Any) -> int:
    """Leave the fault's context; how often the injected code ran in this process."""
    stack, fired = worker.verifier_fault
    del worker.verifier_fault
    stack.close()
    return fired.count
