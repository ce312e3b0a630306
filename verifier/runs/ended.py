"""Evidence of what ended a run."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from verifier.core.manifest import Scope
from verifier.core.store import Recorder
from verifier.launch.stack_failure import StackFailed, failure_of


def record_failure(trace: Path, problem: BaseException) -> Sequence[Scope]:
    """Record a failure of the stack under test in the trace of the run that it ended; any other error is no evidence.

    Returns:
        Scopes of the checks that this gives a subject.
    """
    failure = failure_of(problem) if isinstance(problem, StackFailed) else None
    if failure is None:
        return ()
    with contextlib.closing(Recorder(trace, "controller", 0)) as probe:
        probe.emit(failure)
    return ("stack",)
