"""Injecting and healing a fault inside an engine's worker process; called through `Engine.call`."""

from __future__ import annotations

import contextlib
from typing import Any

from verifier.engine.client import EngineClient
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import Fault, Fired, Side

_HERE = "verifier.faults.engine_side"


def begin(client: EngineClient, fault: Fault) -> None:
    """Have the engine enter a fault's context, where the fault lives."""
    if fault.side is Side.DRIVER:
        client.call_driver(_HERE, "inject", [fault.id])
    else:
        client.call(_HERE, "inject", [fault.id])


def end(client: EngineClient, fault: Fault) -> int:
    """Have the engine leave it again; how often the injected code ran there."""
    counts = client.call(_HERE, "heal")
    return sum(counts) + (client.call_driver(_HERE, "heal") if fault.side is Side.DRIVER else 0)


def inject(worker: Any, fault_id: str) -> bool:
    """Enter the fault's context in this process and leave it open until `heal`."""
    heal(worker)
    fired = Fired()
    stack = contextlib.ExitStack()
    stack.enter_context(CATALOG[fault_id].inject(fired))
    worker.verifier_fault = (stack, fired)
    return True


def heal(worker: Any) -> int:
    """Leave the fault's context, if one was entered, and what it left in the engine's caches.

    Returns:
        How often the injected code ran in this process.
    """
    stack, fired = worker.__dict__.pop("verifier_fault", (contextlib.ExitStack(), Fired()))
    stack.close()
    if hasattr(worker, "verifier_clear_cache"):
        worker.verifier_clear_cache()
    return fired.count
