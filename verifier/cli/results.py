"""From a saved trace to text, files and an exit code; the end of every judging command."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from verifier.core.finding import ExitCode
from verifier.core.outputs import printable, require_writable, write_whole
from verifier.errors import UsageError, VerifierError
from verifier.report.progress import Progress, shown_progress
from verifier.report.render_text import Detail

if TYPE_CHECKING:
    from verifier.report import Report

JsonOption = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write the complete report as JSON; `-` prints it, and no text."),
]
HtmlOption = Annotated[
    Path | None, typer.Option("--html", metavar="FILE", help="Also write one HTML page that holds all it needs.")
]
STDOUT = Path("-")
"""File of results that stands for stdout."""
LISTENERS: list[Callable[[Report], None]] = []
"""Called with each report that is made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Files that a report was asked for in, each None or `STDOUT` or to be written, and the length of its text."""

    json: Path | None = None
    junit: Path | None = None
    html: Path | None = None
    detail: Detail = Detail.USUAL

    @property
    def takes_stdout(self) -> bool:
        """True if a file stands for stdout, which then gets no text."""
        return STDOUT in (self.json, self.junit, self.html)


_JUNIT = typer.Option("--junit", metavar="FILE", help="Also write the report as JUnit XML, one case per check.")
_OPTIONS = {
    "json": JsonOption,
    "junit": Annotated[Path | None, _JUNIT],
    "html": HtmlOption,
    "quiet": Annotated[bool, typer.Option("--quiet", "-q", help="Print the verdict and the cause alone.")],
    "verbose": Annotated[bool, typer.Option("--verbose", "-v", help="Print every finding whole.")],
}
"""Options in the place of a parameter `results`."""


def reported(function: Callable[..., int]) -> Callable[..., int]:
    """Give a command the options of a report in the place of its parameter `results`.

    Files that cannot be written, and --quiet beside --verbose, are refused before it runs.
    """

    @functools.wraps(function)
    def command(
        *config: Any, json: Path | None, junit: Path | None, html: Path | None, quiet: bool, verbose: bool, **own: Any
    ) -> int:
        require_results(json, junit, html)
        if quiet and verbose:
            raise UsageError("--quiet and --verbose contradict each other: give one of the two")
        detail = Detail.ANSWER if quiet else Detail.WHOLE if verbose else Detail.USUAL
        return function(*config, results=Results(json=json, junit=junit, html=html, detail=detail), **own)

    command.__signature__ = inspect.Signature(list(_parameters(function)))  # type: ignore[attr-defined]
    command.__annotations__ = {}
    return command


def _parameters(function: Callable[..., int]) -> Iterator[inspect.Parameter]:
    by_name = inspect.Parameter.KEYWORD_ONLY
    for item in inspect.signature(function, eval_str=True).parameters.values():
        if item.name != "results":
            yield item.replace(kind=by_name)
            continue
        for name, option in _OPTIONS.items():
            default = False if name in ("quiet", "verbose") else None
            yield inspect.Parameter(name, by_name, default=default, annotation=option)


def require_results(*files: Path | None) -> None:
    """Refuse result files that could not be written, before the run that they are the result of.

    Raises:
        UsageError: one cannot be written, or is asked for twice.
    """
    named = [file for file in files if file is not None]
    if len({file.absolute() for file in named}) < len(named):
        raise UsageError(f"`{named[0]}` is asked for twice: give each result a file of its own")
    for file in named:
        if file != STDOUT:
            require_writable(file)


def show(text: str) -> None:
    """Print to stdout; a reader that has gone away (`| head`, `>&-`) is no error, a full disk is a UsageError."""
    if sys.stdout is None:  # closed before this interpreter started
        return
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError as problem:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(problem, BrokenPipeError):
            raise UsageError(f"stdout cannot be written: {problem.strerror}") from problem


def complain(sentence: str) -> None:
    """Print what ended a command to stderr."""
    with contextlib.suppress(OSError):  # nobody may be left to read it; the exit code stands
        print("verifier:", "\n".join(map(printable, sentence.split("\n"))), file=sys.stderr, flush=True)


def show_results(text: Callable[[], str], *files: tuple[Path | None, Callable[[], str]]) -> None:
    """Print the text, unless a file stands for stdout, and write each file that was asked for by its renderer."""
    if all(file != STDOUT for file, _ in files):
        from verifier.report.render_text import for_terminal

        show(for_terminal(text(), sys.stdout))
    for file, render in files:
        if file == STDOUT:
            show(render())
        elif file is not None:
            write_whole(file, render())


def judge_trace(path: Path, results: Results, *, codes: Sequence[str] = (), names: str = "") -> int:
    """Read a trace, run its checks, print and write what they found; returns the exit code that this calls for.

    Raises:
        UsageError: there is no trace, or nothing in it has such a name.
    """
    import verifier.checks  # noqa: F401  (fills the registry)
    from verifier.core import store
    from verifier.report import render_json, render_junit, render_text, report_of

    trace = store.read(path)
    report = report_of(trace, str(path), only_codes=codes, only_names=names)
    if names and report.compared_nothing:
        raise UsageError(f"these checks compared nothing whose name contains `{names}`: leave --only out to see all")
    for listener in LISTENERS:
        listener(report)

    def page() -> str:
        from verifier.report.pages import page_of_report
        from verifier.report.render_html import html

        return html(page_of_report(report, trace))

    show_results(
        lambda: render_text(report, results.detail),
        (results.json, lambda: render_json(report)),
        (results.junit, lambda: render_junit(report)),
        (results.html, page),
    )
    return int(report.exit_code)


def run_and_judge(what: str, run: Callable[[Progress], object], trace: Path, results: Results) -> int:
    """Run something that leaves a trace, then judge the trace; also what a run that broke had recorded.

    A run that broke begins with its reason, and is a violation where its trace already shows one; of any other, the
    exit code is that of its error.

    Raises:
        UsageError: nothing was run.
        VerifierError: the run broke and left no trace.
    """
    try:
        with shown_progress(what, silent=results.detail is Detail.ANSWER) as progress:
            run(progress)
    except UsageError:
        raise
    except VerifierError as problem:
        if not (trace / "manifest.json").exists():
            raise
        complain(str(problem))  # before the checks, which take their time
        if (trace / "logs").is_dir():
            complain(f"logs of the run's processes are in `{trace / 'logs'}`")
        judged = judge_trace(trace, results)
        return int(ExitCode.VIOLATED if judged == ExitCode.VIOLATED else problem.exit_code)
    return judge_trace(trace, results)


def save_traceback() -> str:
    """Save the traceback; return its place as the end of a sentence, or the traceback if no file can be written."""
    import tempfile
    import traceback

    try:
        with tempfile.NamedTemporaryFile("w", prefix="verifier-", suffix=".txt", delete=False) as file:
            file.write(" ".join(sys.argv) + "\n\n" + traceback.format_exc())
    except OSError:
        return "\n" + traceback.format_exc()
    return f"; the traceback is in `{file.name}`"
