"""A weight of an engine that is not finite after an update, in the engine's own process."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

from verifier.trainer.generation import EngineRollouts

WEIGHT = "model.norm.weight"


def poison(worker: Any, number: int) -> None:
    """Leave NaN in a weight at the end of so manieth update, and of all later ones; called through `Engine.call`."""
    name = "verifier_finish" if hasattr(worker, "verifier_finish") else "finish_update"
    whole, seen = getattr(worker, name), 0

    def finish(*arguments: Any, **named: Any) -> Any:
        nonlocal seen
        found, seen = whole(*arguments, **named), seen + 1
        if seen >= number:
            model = worker.model_runner.model if hasattr(worker, "model_runner") else worker.model
            model.get_parameter(WEIGHT).data[0] = math.nan
        return found

    setattr(worker, name, finish)


@contextlib.contextmanager
def poisoned(number: int) -> Iterator[None]:
    """Poison the engines that a training run of this process connects to."""
    start = EngineRollouts.start

    def starting(self: EngineRollouts, client: Any) -> None:
        client.call("tests.dist.poisoned_weights:poison", number)
        start(self, client)

    EngineRollouts.start = starting  # type: ignore[method-assign]
    try:
        yield
    finally:
        EngineRollouts.start = start  # type: ignore[method-assign]
