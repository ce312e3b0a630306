"""`verifier faults`: the catalogue, single trials, and the kill matrix."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from verifier.cli.results import show
from verifier.core.finding import ExitCode
from verifier.core.ledger import append_line
from verifier.core.outputs import require_empty, require_writable, write_whole

app = typer.Typer(
    help="Re-enacted bugs: list them, inject some, or draw the matrix of checks and faults.",
    rich_markup_mode=None,
)


@app.command("list")
def list_() -> int:
    """Print every fault with its stage and the bug it re-enacts."""
    from verifier.faults.matrix import listing

    show(listing())
    return ExitCode.HOLDS


@app.command()
def run(
    ids: Annotated[
        list[str], typer.Argument(metavar="FAULT...", help="Ids of faults, as `verifier faults list` prints them.")
    ],
    keep: Annotated[
        Path | None,
        typer.Option(
            "--keep",
            metavar="DIR",
            help="Keep the faulted traces here; by default in the next free traces/faults-NNNN.",
        ),
    ] = None,
) -> int:
    """Inject some, one trial each: clean, faulted, healed."""
    from verifier.config.commands import next_trace
    from verifier.faults.matrix import chosen, run_trials

    faults = chosen(ids)
    keep = keep or next_trace("faults")
    require_empty(keep, "--keep")
    return run_trials(faults, show, keep=keep)


@app.command()
def matrix(
    ledger: Annotated[
        Path | None, typer.Option("--ledger", metavar="FILE", help="Run what it lacks for this commit, and append.")
    ] = None,
    only: Annotated[
        list[str] | None, typer.Option("--only", metavar="STAGE", help="Run faults of this stage; can be repeated.")
    ] = None,
    no_run: Annotated[bool, typer.Option("--no-run", help="Run nothing, draw the ledger.")] = False,
    gpu_results: Annotated[
        Path | None, typer.Option("--gpu-results", metavar="FILE", help="Append faults from a results file of ci/gpu.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("--output", metavar="DIR", help="Write the pages of Markdown here.")
    ] = None,
) -> int:
    """Run trials, and draw which checks catch which faults."""
    from verifier.faults.matrix import fill, of_stages, pages, read, rows_of_gpu_run

    faults = of_stages(only or ())
    if output is not None:
        if not output.is_dir():
            require_writable(output)
        require_writable(output / "README.md", make_folder=True)
    if ledger is not None:
        require_writable(ledger)
    with tempfile.TemporaryDirectory() as folder:
        rows = ledger or Path(folder) / "ledger.jsonl"
        if gpu_results is not None:
            for row in rows_of_gpu_run(gpu_results):
                append_line(rows, row)
        code = ExitCode.HOLDS if no_run else fill(rows, faults, show)
        if output is not None:
            for name, text in pages(read(rows)).items():
                write_whole(output / name, text)
    return code
