"""Verdicts on the traces of a run's steps: asked for as steps end, awaited before more is built on them."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from verifier.errors import InternalError, VerifierError, ViolationFound
from verifier.trainer.metrics import Metrics

DEADLINE_S = 600.0
"""Seconds that the judge of one trace may take."""


@dataclass(frozen=True, slots=True)
class Judged:
    """Verdict on the trace of one step."""

    exit_code: int
    text: str
    """The report."""


class Judge(Protocol):
    """Judges traces of steps in a process of its own."""

    def submit(self, trace: Path) -> Future[Judged]:
        """Begin to judge a trace."""


def awaited(verdict: Future[Judged], what: str) -> Judged:
    """Verdict on a trace; `what` names it in an error.

    Raises:
        InternalError: none came within `DEADLINE_S`.
    """
    try:
        return verdict.result(DEADLINE_S)
    except TimeoutError as problem:
        raise InternalError(f"the judge of {what} did not answer in {DEADLINE_S:g} s") from problem


def require_held(judge: Judge, trace: Path, what: str) -> None:
    """Have a trace judged; raise a ViolationFound if a check does not hold."""
    judged = awaited(judge.submit(trace), what)
    if judged.exit_code:
        raise ViolationFound(judged.text, judged.exit_code)


@dataclass(kw_only=True)
class Verdicts:
    """Verdicts on the steps of one run.

    Args:
        judge: judges them, one after another; None for a run without evidence.
        metrics: of the run, which is told of each verdict.
    """

    judge: Judge | None
    metrics: Metrics
    num_judged: int = field(default=0, init=False)
    """Steps that were judged, all of which held."""
    _pending: deque[tuple[int, Future[Judged]]] = field(default_factory=deque, init=False)

    def ask(self, step: int, trace: Path) -> None:
        """Begin to judge a step."""
        assert self.judge is not None
        self._pending.append((step, self.judge.submit(trace)))

    def settle(self, until: int) -> None:
        """Wait for the verdicts of all steps up to one.

        Raises:
            ViolationFound: of the first that does not hold.
            InternalError: the judge did not answer.
        """
        while self._pending and self._pending[0][0] <= until:
            step, verdict = self._pending.popleft()
            judged = awaited(verdict, f"step {step}")
            self.num_judged += 1
            self.metrics.judged(step, judged.exit_code)
            if judged.exit_code:
                raise ViolationFound(judged.text, judged.exit_code)

    @contextlib.contextmanager
    def first(self, until: int) -> Iterator[None]:
        """Let a step that does not hold, up to one, go before an error within, which it may be the cause of."""
        try:
            yield
        except VerifierError:
            self.settle(until)
            raise
