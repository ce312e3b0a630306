"""Progress of a run: a spinner or a live table on a terminal, a line a stage elsewhere."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.live import Live


Progress = Callable[[str], None]
"""Takes one short line: what the run is doing now."""
BAR = 24
"""Columns of the longest bar."""
_STAGES = (("rollout", "rollout_s"), ("score", "score_s"), ("train", "train_s"), ("sync", "sync_s"))
"""Stage -> metric of its seconds."""
_LEARNING = ("loss", "reward", "held_out_reward", "accuracy", "entropy", "kl", "clipped_share", "answer_tokens")
_VERDICTS = {0: "holds", 1: "violated", 2: "inconclusive"}


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


class LiveView:
    """Table of a run's last step above a line that says what it is doing; make one with `live_view`."""

    def __init__(self, console: Console, what: str) -> None:
        self._console, self._what = console, what
        self._live: Live | None = None
        self._values: Mapping[str, Any] = {}
        self._steps, self._verdict, self._doing = 0, "", ""

    @contextlib.contextmanager
    def run(self, steps: int) -> Iterator[None]:
        """Show a run of so many steps until exit; its last table stays."""
        self._values, self._steps, self._verdict, self._doing = {}, steps, "", ""
        from rich.live import Live

        with Live(console=self._console, auto_refresh=False, redirect_stdout=False) as self._live:  # it may be a file
            self._draw()
            try:
                yield
            finally:
                self._doing = ""
                self._draw()
                self._live = None

    def progress(self, text: str) -> None:
        """Show what the run is doing now."""
        self._doing = text
        self._draw()

    def add(self, values: Mapping[str, Any]) -> None:
        """Show the metrics of a step."""
        self._values = values
        self._draw()

    def judged(self, step: int, exit_code: int) -> None:
        """Keep the verdict on a step, to be shown with the next metrics."""
        self._verdict = f"step {step:,} {_VERDICTS.get(exit_code, 'not judged')}"

    def shown(self) -> RenderableType:
        """Return the table and the line as they are now."""
        from rich.console import Group
        from rich.text import Text

        shown: list[RenderableType] = []
        if self._values:
            shown.append(table_of(self._values, self._steps, self._verdict))
        if self._doing:
            shown.append(Text(f"{self._what}: {self._doing}", no_wrap=True, overflow="ellipsis"))
        return Group(*shown)

    def _draw(self) -> None:
        if self._live is not None:
            self._live.update(self.shown(), refresh=True)


def table_of(values: Mapping[str, Any], steps: int, verdict: str) -> RenderableType:
    """Table of the metrics of a step."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in _rows(values, steps, verdict):
        table.add_row(name, Text(text))
    return table


def _rows(values: Mapping[str, Any], steps: int, verdict: str) -> Iterator[tuple[str, str]]:
    yield "step", f"{values['step']:,} of {steps:,}"
    learning = {name.replace("_", " "): values[name] for name in _LEARNING if name in values}
    yield "learning", ", ".join(f"{name} {value:.3g}" for name, value in learning.items())
    if "held_out_version" in values:
        yield "held out", f"evaluated with version {values['held_out_version']:.0f}"
    longest = max((values.get(seconds, 0.0) for _, seconds in _STAGES), default=0.0)
    for stage, seconds in _STAGES:
        if seconds in values:
            bar = "#" * round(BAR * values[seconds] / longest) if longest else ""
            rate = values.get(f"{stage}_tokens_per_s")
            yield stage, f"{bar:{BAR}} {values[seconds]:.3g} s" + ("" if rate is None else f", {rate:,.0f} tokens/s")
    device = [f"peak memory {values['peak_memory_gib']:.3g} GiB"] if "peak_memory_gib" in values else []
    device += [f"MFU {values['mfu']:.1%}"] if "mfu" in values else []
    if device:
        yield "device", ", ".join(device)
    if "mismatch_floor" in values:
        trend = f", {values['mismatch_trend']:.3g} times lately" if "mismatch_trend" in values else ""
        said = f"p99 {values['mismatch_p99']:.3g} nats, floor {values['mismatch_floor']:.3g}{trend}; "
        yield "mismatch", said + f"greatest {values['mismatch_max']:.3g}, k3 {values['mismatch_k3']:.3g}"
    if verdict:
        yield "judged", verdict
    for sign in values.get("signs", ()):
        yield "sign", sign


@contextlib.contextmanager
def live_view(what: str) -> Iterator[tuple[Progress, LiveView | None]]:
    """Progress and view of runs on a terminal's stderr; if that is a file, plain lines and no view."""
    if not sys.stderr.isatty():
        yield plain_lines(what), None
        return
    from rich.console import Console

    view = LiveView(Console(stderr=True), what)
    yield view.progress, view
