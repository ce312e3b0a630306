"""Tables as text: framed for results, plain columns for lists."""

from __future__ import annotations

import io
import shutil
from collections.abc import Collection, Iterable, Sequence

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
