"""`verifier faults`: the catalogue, single trials, and the kill matrix."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verifier.cli.results import require_results, show, write_whole
from verifier.core.gate import ExitCode
from verifier.core.outputs import require_empty

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
    keep: Annotated[Path | None, typer.Option("--keep", metavar="DIR", help="Keep the traces here.")] = None,
) -> int:
    """Inject some, one trial each: clean, faulted, healed."""
    from verifier.faults.matrix import chosen, run_trials

    faults = chosen(ids)
    if keep is not None:
        require_empty(keep, "--keep")
    return run_trials(faults, keep=keep, write=show)


@app.command()
def matrix(
    output: Annotated[Path | None, typer.Option("--output", metavar="FILE", help="Write it as Markdown.")] = None,
) -> int:
    """Run every trial and draw which checks catch which faults."""
    from verifier.faults.matrix import chosen, run_trials

    require_results(output)
    results: list[str] = []
    code = run_trials(chosen(()), keep=None, write=show, markdown=results.append)
    if output is not None:
        write_whole(output, results[0])
    return code
