"""A fault: one shipped bug re-enacted in the real code path, with its source and who must catch it."""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from verifier.core.stage import Stage
from verifier.mesh import Mesh


class Side(enum.Enum):
    """The process in which the bug lives."""

    TRAINER = "trainer"
    ENGINE = "engine"
    """Every rank of the engine."""
    DRIVER = "driver"
    """The engine's process that schedules requests and hands out what the ranks give."""


@dataclass(slots=True)
class Fired:
    """How often the injected code ran in this process. A trial in which it never ran proves nothing."""

    count: int = 0
    mark: Path | None = None
    """File that appears when it runs for the first time, so that it is known of a process that died too."""

    def __call__(self) -> None:
        """Count one run of the injected code."""
        self.count += 1
        if self.count == 1 and self.mark is not None:
            self.mark.touch()


NO_ENGINE = "none"
"""Engine of a fault that is caught before anything is exported: its trials load, score, replay and train only."""

Inject = Callable[[Fired], contextlib.AbstractContextManager[None]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the catalogue."""

    id: str
    """The bug's mechanism, kebab-case."""
    stage: Stage
    """Where the bug sits, and so the first bad stage that every report on it must name."""
    reproduces: str
    """Repository and issue, pull request or commit of the bug that shipped."""
    summary: str
    """What goes wrong, at the size it had in life."""
    caught_by: tuple[str, ...]
    """Codes of the checks that must be violated."""
    inject: Inject
    """Context manager that patches the real code path, and heals it on exit, even on an error."""
    side: Side = Side.TRAINER
    model: str = "tiny:qwen3-moe"
    mesh: Mesh = field(default_factory=Mesh)
    """The smallest mesh on which the bug shows."""
    engine: str = "hf"
    dtype: str = "float32"
    update: str = "step"
    engine_tp: int = 1
    fixes: tuple[str, ...] = ()
    """Ids of the upstream fixes without which the clean run does not hold."""
    lora_rank: int = 0
    """Above 0: an adapter of this rank is trained and synced, and the base is frozen."""
    gpus: int = 0
    """GPUs without which the bug cannot be: its trial is a test of `tests/h100`."""
