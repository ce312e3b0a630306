"""Reader and judge of traces, which `import verifier` offers beside `verifier.probe`; torch is not needed."""

from __future__ import annotations

import os
from pathlib import Path

import verifier.checks  # noqa: F401  (fills the registry, plugins' checks and kinds of records too)
from verifier.core import store
from verifier.core.check import LOOP
from verifier.core.trace import Trace
from verifier.report import Report, report_of


def read(path: str | os.PathLike[str]) -> Trace:
    """Read a trace directory, all of it; its arrays when they are asked for.

    Example:
        >>> trace = verifier.read("traces/roundtrip-0001")  # doctest: +SKIP
        >>> [item.name for item in trace.of(ExportedTensor, version=1)]  # doctest: +SKIP

    Raises:
        UsageError: no trace there, a format that this version does not know, or a trace that is not whole; or a plugin
            cannot be loaded.
    """
    return store.read(Path(path))


def judge(trace: Trace | str | os.PathLike[str]) -> Report:
    """Run every check that says it judges such a run, those of plugins too; what `verifier judge` and `replay` print.

    Of a path, a recorded loop that was not closed is sealed first; a `Trace` stays as it was read.

    Example:
        >>> report = verifier.judge("traces/my-loop")  # doctest: +SKIP
        >>> assert report.verdict is Verdict.HOLDS, verifier.report.render_text(report)  # doctest: +SKIP
    """
    if not isinstance(trace, Trace):
        trace = read(trace)
        if trace.manifest.command == LOOP and not trace.manifest.complete:
            from verifier.probe.tokens import seal

            seal(Path(trace.path))
            trace = read(trace.path)
    return report_of(trace, trace.path)
