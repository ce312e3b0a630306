"""`verifier report`: the page of what was run before, and what changed between two results."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from verifier.cli.results import JsonOption, require_results, show_results
from verifier.core.finding import ExitCode

app = typer.Typer(help="Draw the page of an earlier result, or compare two results.", rich_markup_mode=None)


@app.command("html")
def page(
    result: Annotated[
        Path, typer.Argument(help="A gate's JSON or folder, a trace directory, or the folder of a training run.")
    ],
    file: Annotated[Path, typer.Argument(help="HTML file to write; `-` prints it.")],
) -> int:
    """Write the page of an earlier gate, trace or training run."""
    require_results(file)
    _write(file, result)
    return ExitCode.HOLDS


@app.command()
def compare(
    old: Annotated[Path, typer.Argument(help="The earlier result: a gate's JSON or folder, or a trace directory.")],
    new: Annotated[Path, typer.Argument(help="The later one, of the same kind.")],
    json: JsonOption = None,
) -> int:
    """Say what changed between two results, cell by cell and check by check; exit 1 if something got worse."""
    require_results(json)
    import verifier.checks  # noqa: F401  (fills the registry)
    from verifier.report.changed_results import compared, render_json, render_text, result_of

    change = compared(result_of(old), result_of(new))
    show_results(lambda: render_text(change), (json, lambda: render_json(change)))
    return ExitCode.VIOLATED if change.worse else ExitCode.HOLDS


@contextlib.contextmanager
def page_of_training(run: Path, file: Path | None) -> Iterator[None]:
    """Page of a training run, written however the run ends, if it has left anything and a page was asked for."""
    try:
        yield
    finally:
        if file is not None and run.is_dir():
            _write(file, run)


def _write(file: Path, result: Path) -> None:
    import verifier.checks  # noqa: F401  (fills the registry)
    from verifier.report.pages import page_of
    from verifier.report.render_html import html

    show_results(str, (file, lambda: html(page_of(result))))
