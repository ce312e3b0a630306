"""Progress of a run: a spinner on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable, Iterator

Progress = Callable[[str], None]
"""Takes one short line: what the run is doing now."""


def plain_lines(what: str) -> Progress:
    """Write each text as a line of its own on stderr, with the seconds since the start: for a log file."""
    began = time.monotonic()

    def show(text: str) -> None:
        print(f"{what}: {time.monotonic() - began:.0f} s: {text}", file=sys.stderr, flush=True)

    return show


@contextlib.contextmanager
def shown_progress(what: str, *, silent: bool = False) -> Iterator[Progress]:
    """A spinner with `what` runs, its step and the time so far on a terminal's stderr, plain lines in a file."""
    if silent or not sys.stderr.isatty():
        yield (lambda text: None) if silent else plain_lines(what)
        return
    from rich.console import Console
    from rich.progress import Progress as Bar
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what)

        def show(text: str) -> None:
            bar.update(task, description=f"{what}: {text}")

        yield show
