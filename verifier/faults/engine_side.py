"""Injecting and healing a fault inside an engine's worker process; called through `Engine.call`."""

from __future__ import annotations

import contextlib
from typing import Any

from verifier.engine.client import EngineClient
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import Fault, FireCounter, Side

_HERE = "verifier.faults.engine_side"


def begin(client: EngineClient, fault: Fault) -> None:
    """Inject a fault into the engine's process in which the bug lives."""
    if fault.side is Side.DRIVER:
        client.call_driver(f"{_HERE}:inject", fault.id)
    else:
        client.call(f"{_HERE}:inject", fault.id)


def end(client: EngineClient, fault: Fault) -> int:
    """Heal the engine.

    Returns:
        Number of times that the injected code ran there.
    """
    counts = client.call(f"{_HERE}:heal")
    return int(sum(counts) + (client.call_driver(f"{_HERE}:heal") if fault.side is Side.DRIVER else 0))


def inject(worker: Any, fault_id: str) -> bool:
    """Inject a fault into this process until `heal`."""
    heal(worker)
    fire = FireCounter()
    stack = contextlib.ExitStack()
    stack.enter_context(CATALOG[fault_id].inject(fire))
    worker.verifier_fault = (stack, fire)
    return True


def heal(worker: Any) -> int:
    """Heal this process, if a fault was injected, and clear what the fault left in the engine's caches.

    Returns:
        Number of times that the injected code ran in this process.
    """
    stack, fire = worker.__dict__.pop("verifier_fault", (contextlib.ExitStack(), FireCounter()))
    stack.close()
    if hasattr(worker, "verifier_clear_cache"):
        worker.verifier_clear_cache()
    return int(fire.count)
