"""A fault entered around a session: in the rank where the bug lives, or at rank 0's request in the engine's process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifier.engine.client import EngineClient
from verifier.faults.catalog import CATALOG
from verifier.faults.fault import Call, Fault, FireCounter, Side, replaced
from verifier.runs.spec import RunSpec

if TYPE_CHECKING:
    from verifier.launch.rank import RankContext
    from verifier.trainer.ranks import WorkerSpec

_HERE = "verifier.faults.injection"
INJECTED = f"{_HERE}:injected"
"""Context manager that ranks enter, for `RunSpec.within` and `WorkerSpec.within`."""


@contextlib.contextmanager
def injected(spec: RunSpec | WorkerSpec | None, context: RankContext, fault_id: str, folder: str) -> Iterator[None]:
    """Inject a fault into this rank, or, at rank 0's request, into the engine's workers.

    The file ``fired-<rank>`` of the folder appears when the injected code runs for the first time, and says how often
    it has run in the end. It lies outside of the trace that checks read. The derivation of a layout has no spec.
    """
    fault = CATALOG[fault_id]
    mark = Path(folder) / f"fired-{context.rank:04d}"
    fire = FireCounter(mark=mark)
    try:
        if fault.side is Side.TRAINER:
            with fault.inject(fire):
                yield
        elif context.rank == 0 and isinstance(spec, RunSpec):
            client = EngineClient(str(spec.engine_socket), deadline_s=spec.deadline_s)
            ask = client.call_driver if fault.side is Side.DRIVER else client.call
            ask(f"{_HERE}:inject", fault.id)
            try:
                yield
            finally:
                fire.count += end(client, fault)
                client.close()
        else:
            yield
    finally:
        if fire.count:
            mark.write_text(str(fire.count))


@contextlib.contextmanager
def in_engines(fault: Fault, fire: FireCounter) -> Iterator[None]:
    """Inject a fault into the process of each engine of a training run, while its controller is connected to them."""

    def started(call: Call) -> Any:
        call.client.call_driver(f"{_HERE}:inject", fault.id)
        call.state["client"] = call.client
        return call.original()

    def closed(call: Call) -> Any:
        if "client" in call.state:
            fire.count += end(call.state.pop("client"), fault)
        return call.original()

    rollouts, own = "verifier.trainer.generation:EngineRollouts", FireCounter()
    with replaced(f"{rollouts}.start(self, client)", started, own), replaced(f"{rollouts}.close(self)", closed, own):
        yield


def end(client: EngineClient, fault: Fault) -> int:
    """Heal the engine, and return how many times the injected code ran there."""
    counts = client.call(f"{_HERE}:heal")
    return int(sum(counts) + (client.call_driver(f"{_HERE}:heal") if fault.side is Side.DRIVER else 0))


def inject(worker: Any, fault_id: str) -> bool:
    """Inject a fault into this process of the engine until `heal`; called through `Engine.call`."""
    heal(worker)
    fire = FireCounter()
    stack = contextlib.ExitStack()
    stack.enter_context(CATALOG[fault_id].inject(fire))
    worker.verifier_fault = (stack, fire)
    return True


def heal(worker: Any) -> int:
    """Heal this process, if a fault was injected, clear what it left in caches, and return how often it ran here."""
    stack, fire = worker.__dict__.pop("verifier_fault", (contextlib.ExitStack(), FireCounter()))
    stack.close()
    if hasattr(worker, "verifier_clear_cache"):
        worker.verifier_clear_cache()
    return int(fire.count)
