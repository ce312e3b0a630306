"""Progress of a run: a spinner on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

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


LEAST_WIDTH = 120
"""Columns of a framed table where the terminal has fewer, or none is there."""


def framed(
    titles: Sequence[str],
    rows: Iterable[Sequence[str]],
    *,
    left: Collection[str],
    least: int = LEAST_WIDTH,
    above: str = "",
) -> str:
    """Table with a frame, at most as wide as the terminal; columns of numbers, not in `left`, end at the right."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=box.ASCII, title=above or None)
    for title in titles:
        drawn.add_column(title, justify="left" if title in left else "right")
    for row in rows:
        drawn.add_row(*row)
    stream = io.StringIO()
    width = max(least, shutil.get_terminal_size().columns)
    Console(file=stream, width=width, highlight=False).print(drawn, markup=False)
    return stream.getvalue()


def columns(rows: Sequence[Sequence[str]]) -> str:
    """Rows, titles first, in columns as wide as their widest text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = ([cell.ljust(width) for cell, width in zip(row, widths, strict=True)] for row in rows)
    return "\n".join(f"  {'   '.join(cells)}".rstrip() for cells in padded)
