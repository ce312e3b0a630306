"""Lines of metrics and points of curves of all steps so far, before and after a process went on from a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator

from verifier.core.comparison import Comparison
from verifier.core.records_policy import Runs, WrittenMetrics
from verifier.core.stage import Stage


def all_steps_once(item: WrittenMetrics) -> Iterator[Comparison]:
    """Each step has the line that it left, and a curve shows no step that was taken again.

    What is right is made of the lines that the process found: those up to the checkpoint, and one for each step since.
    """
    new: Runs = ((item.begun + 1, item.version),) if item.version > item.begun else ()
    stage = Stage.LOSS if new else Stage.CHECKPOINT
    if item.lines is not None:
        yield _compared(
            item, "lines", item.lines, _joined((*_until(item.lines_found, item.begun), *new)), stage,
            where="metrics.jsonl", hint="look at how the file is opened, and at what a resume removes of it",
        )  # fmt: skip
    if item.events is not None:
        yield _compared(
            item, "points", item.events, new, stage, where="TensorBoard's file of this process",
            hint="look at which steps the writer of events is given",
        )  # fmt: skip
        right = item.begun + 1 if new else item.restart
        yield Comparison(
            what="restart of TensorBoard", same=item.restart == right, stage=stage, version=item.version, badness=1.0,
            sentence=f"TensorBoard forgets {_from(item.restart)}, and the run took its steps from {right} on again",
            expected=_from(right), actual=_from(item.restart), allowed="exact (numbers of steps)",
            hint="look at whether the writer says that it restarts, and from which step on",
        )  # fmt: skip


def _until(runs: Runs, step: int) -> Runs:
    return tuple((first, min(last, step)) for first, last in runs if first <= step)


def _joined(runs: Runs) -> Runs:
    """Runs, of which one that goes on where the last one ends is a part of that."""
    found: list[tuple[int, int]] = []
    for first, last in runs:
        if found and found[-1][1] + 1 == first:
            found[-1] = found[-1][0], last
        else:
            found.append((first, last))
    return tuple(found)


def _compared(
    item: WrittenMetrics, what: str, actual: Runs, expected: Runs, stage: Stage, *, where: str, hint: str
) -> Comparison:  # fmt: skip
    return Comparison(
        what=what, same=actual == expected, stage=stage, version=item.version, badness=1.0,
        sentence=f"{where} has {what} of {_said(actual)} after step {item.version}, they should be of "
        f"{_said(expected)}",
        expected=f"{_said(expected)} (gone on from step {item.begun})", actual=f"{_said(actual)} (read back)",
        allowed="exact (numbers of steps)", hint=hint,
    )  # fmt: skip


def _said(runs: Runs) -> str:
    """Runs as text, the last ones of many."""
    parts = [f"{first}" if first == last else f"{first} to {last}" for first, last in runs]
    return "no step" if not parts else f"steps {', '.join(['...', *parts[-8:]] if len(parts) > 8 else parts)}"


def _from(step: int) -> str:
    return "no step" if step < 0 else f"steps from {step} on"
