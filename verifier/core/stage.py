"""The rooms, in the order in which data visits them within one weight version."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType, TracebackType

_MARK = "verifier_stage"


class Stage(enum.IntEnum):
    """One room. The integer order is the data-flow order, so the first bad stage is a ``min``."""

    LOAD = 0
    """Checkpoint to live Megatron parameters, through Megatron-Bridge."""
    DATA = 1
    """Data set to the examples and rollouts of a step."""
    REWARD = 2
    """Answers to rewards."""
    ADVANTAGE = 3
    """Rewards and masks to the advantage and the weight of each token."""
    PACK = 4
    """Rollouts to packed, aligned, sharded micro-batches."""
    REPLAY = 5
    """Recorded expert routes to per-layer router indices."""
    LOGPROB = 6
    """Trainer forward and log-probabilities."""
    LOSS = 7
    """Loss and gradients."""
    TRAIN = 8
    """Optimizer step: master weights, replicas, the live parameters after it."""
    CHECKPOINT = 9
    """State of a run to files, and back."""
    EXPORT = 10
    """Live parameters to checkpoint tensors, through Megatron-Bridge."""
    PLAN = 11
    """Order, names, dtypes, bytes of what will travel."""
    TRANSPORT = 12
    """Bytes from trainer to engine."""
    ENGINE = 13
    """Contents of the engine after loading: parameters, buffers, derived tensors."""
    ROLLOUT = 14
    """Log-probabilities that the engine computes with what it holds."""

    @property
    def label(self) -> str:
        """Lower-case name, as printed in reports and stored in traces."""
        return self.name.lower()


def modules_of(part: str) -> Iterator[ModuleType]:
    """Import the modules of every stage whose names begin with "records", "checks" or "faults"."""
    for stage in Stage:
        package = import_module(f"verifier.stages.{stage.label}")
        for found in iter_modules(package.__path__):
            if found.name.startswith(part):
                yield import_module(f"{package.__name__}.{found.name}")


@contextlib.contextmanager
def in_stage(stage: Stage, version: int = 0) -> Iterator[None]:
    """Mark an exception with the stage, and the weight version, that it ended; the innermost mark stays."""

    def mark(kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and stage_of(error) is None:
            error.__dict__[_MARK] = (stage, version)

    with contextlib.ExitStack() as stack:
        stack.push(mark)
        yield


def stage_of(error: BaseException) -> tuple[Stage, int] | None:
    """Stage and weight version that an exception ended, as `in_stage` marked it; None for one without a mark."""
    found: tuple[Stage, int] | None = error.__dict__.get(_MARK)
    return found
