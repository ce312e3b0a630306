"""A fault: one shipped bug, written as the function that stands in for the right one, and what must catch it."""

from __future__ import annotations

import contextlib
import enum
import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifier.core.stage import Stage
from verifier.faults.inject import replaced
from verifier.mesh import Mesh


class Side(enum.Enum):
    """Process in which the bug lives."""

    TRAINER = "trainer"
    ENGINE = "engine"
    """Every worker of the engine."""
    DRIVER = "driver"
    """The engine's process that schedules requests and collects what the workers return."""


@dataclass(slots=True)
class FireCounter:
    """Number of times that the injected code ran in this process. A trial in which it never ran proves nothing."""

    count: int = 0
    mark: Path | None = None
    """File that appears when the code runs for the first time, so that it is known of a process that died too."""
    state: dict[str, Any] = field(default_factory=dict)
    """Values that a fault keeps from one call to the next; empty again when the fault is healed."""
    _undo: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

    def __call__(self) -> None:
        """Count one run of the injected code."""
        self.count += 1
        if self.count == 1 and self.mark is not None:
            self.mark.touch()

    def undo(self, function: Callable[..., object], *args: Any) -> None:
        """Call a function when the fault is healed; the last one given is called first."""
        self._undo.callback(function, *args)

    @contextlib.contextmanager
    def healing(self) -> Iterator[None]:
        """Undo on exit, even on an error, what the fault left behind."""
        try:
            with self._undo:
                yield
        finally:
            self.state.clear()


NO_ENGINE = "none"
"""Engine of a fault that is caught before anything is exported: its trials load, score, replay and train only."""

Body = Callable[..., Any]
"""Replacement of one function, called as ``body(original, fire, *args, **kwargs)``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """One row of the catalogue."""

    id: str
    """Mechanism of the bug, kebab-case."""
    stage: Stage
    """Stage in which the bug sits, and so the first bad stage that every report on it must name."""
    reproduces: str
    """Repository and issue, pull request or commit of the bug that shipped."""
    summary: str
    """One sentence: what goes wrong, at the size that it had in life."""
    caught_by: tuple[str, ...]
    """Codes of the checks that must be violated."""
    side: Side = Side.TRAINER
    model: str = "tiny:qwen3-moe"
    mesh: Mesh = field(default_factory=Mesh)
    """Smallest mesh on which the bug shows."""
    engine: str = "hf"
    dtype: str = "float32"
    update: str = "step"
    engine_tp: int = 1
    fixes: tuple[str, ...] = ()
    """Ids of the upstream fixes without which the clean run does not hold."""
    lora_rank: int = 0
    """Rank of the adapter that is trained and synced while the base is frozen; 0 trains the whole model."""
    gpus: int = 0
    """GPUs that the bug needs. Above 0, its trial is a test of `tests/h100`."""
    replacements: list[tuple[str, Body]] = field(default_factory=list, compare=False, repr=False)
    """Targets and what stands in for each while the fault is injected."""

    def also(self, *targets: str) -> Callable[[Body], Body]:
        """Replace further targets by the decorated function, which is called as the fault's own is."""

        def add(body: Body) -> Body:
            self.replacements.extend((target, body) for target in targets)
            return body

        return add

    @contextlib.contextmanager
    def inject(self, fire: FireCounter) -> Iterator[None]:
        """Patch the real code path, and heal it on exit, even on an error.

        Raises:
            ContractError: a target is gone or has other parameters than the fault was written for.
        """
        with contextlib.ExitStack() as stack:
            for target, body in self.replacements:
                path, _, parameters = target.rstrip(")").partition("(")
                stack.enter_context(replaced(path, parameters, functools.partial(_replacement, body, fire)))
            stack.enter_context(fire.healing())
            yield


def _replacement(body: Body, fire: FireCounter, original: Callable[..., Any]) -> Callable[..., Any]:
    """Return a plain function, since a method has to bind to its object."""

    def faulty(*args: Any, **kwargs: Any) -> Any:
        return body(original, fire, *args, **kwargs)

    return faulty


CATALOG: dict[str, Fault] = {}
"""Every registered fault by id; `verifier.faults.catalog` imports the files that register them."""


def fault(*targets: str, **row: Any) -> Callable[[Body], Fault]:
    """Register the decorated function as a fault.

    The function stands in for each target while the fault is injected: it is called with the original, the
    `FireCounter` to call where the wrong thing happens, and then what the target is called with. The first line of its
    docstring is the fault's summary.

    Args:
        targets: ``package.module:Owner.name(parameters)``, with the parameter names of the installed upstream version.
            The fault is refused when they differ.
        row: fields of `Fault`.

    Raises:
        ValueError: the id is taken, or the function has no docstring.
    """

    def register(body: Body) -> Fault:
        if not body.__doc__:
            raise ValueError(f"fault `{row['id']}` has no summary: write the docstring first")
        found = Fault(summary=inspect.cleandoc(body.__doc__).splitlines()[0], **row)
        if found.id in CATALOG:
            raise ValueError(f"fault id `{found.id}` is taken")
        found.also(*targets)(body)
        CATALOG[found.id] = found
        return found

    return register
