"""Evidence of what ended a run."""

from __future__ import annotations

import contextlib
from pathlib import Path

from verifier.core.store import Recorder
from verifier.launch.failures import StackFailed, failure_of


def record_failure(trace: Path, problem: BaseException) -> bool:
    """Record a failure of the stack under test in the trace of the run that it ended; any other error is no evidence.

    Returns:
        Whether it is one.
    """
    failure = failure_of(problem) if isinstance(problem, StackFailed) else None
    if failure is None:
        return False
    with contextlib.closing(Recorder(trace, "controller", 0)) as probe:
        probe.emit(failure)
    return True
