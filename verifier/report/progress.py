"""Progress of a run on a terminal; nothing where nobody looks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

Progress = Callable[[str], None]
"""Takes one short line: what the run is doing now."""


@contextlib.contextmanager
def shown_progress(what: str, *, silent: bool = False) -> Iterator[Progress]:
    """A spinner with `what` runs, its step and the time so far on a terminal's stderr; none if that is a file."""
    if silent or not sys.stderr.isatty():
        yield lambda text: None
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
