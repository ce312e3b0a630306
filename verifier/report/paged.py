"""The page of anything that was written before: a gate's result, a trace, or a training run's folder."""

from __future__ import annotations

from pathlib import Path

import msgspec

from verifier.core import store
from verifier.errors import UsageError
from verifier.report import report_of
from verifier.report.gate_page import page_of_gate
from verifier.report.gate_result import RESULT, GateResult
from verifier.report.report_page import page_of_report
from verifier.report.run_charts import METRICS
from verifier.report.training_page import page_of_run
from verifier.report.view import Page


def page_of(path: Path) -> Page:
    """Page of what lies at a path.

    Raises:
        UsageError: nothing that has a page.
    """
    if (gate := gate_at(path)) is not None:
        return page_of_gate(gate, path if path.is_dir() else None)
    if (path / METRICS).is_file() or (path / "steps").is_dir():
        return page_of_run(path)
    trace = store.read(path)
    return page_of_report(report_of(trace, str(path)), trace)


def gate_at(path: Path) -> GateResult | None:
    """Result of a gate, from its JSON or from its folder; None for another folder.

    Raises:
        UsageError: a file that is no gate's result, or nothing at all.
    """
    file = path / RESULT if path.is_dir() else path
    if path.is_dir() and not file.is_file():
        return None
    try:
        return msgspec.json.decode(file.read_bytes(), type=GateResult)
    except OSError as problem:
        raise UsageError(f"`{file}` cannot be read: {problem.strerror}") from problem
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as problem:
        said = " ".join(str(problem).split())
        raise UsageError(f"`{file}` is not the JSON that `verifier gate --json` writes: {said}") from problem
