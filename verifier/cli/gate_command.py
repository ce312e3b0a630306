"""The command `verifier gate`, without what it needs to run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from verifier.cli.results import HtmlOption, JsonOption, require_results
from verifier.config import GateConfig
from verifier.errors import UsageError


def file_of_resume(*, resume: Path | None, **_: object) -> Path | None:
    """File of the config that a gate goes on by; None for a new one."""
    from verifier.cli.gated_release import config_in

    return None if resume is None else config_in(resume)


def gate(
    config: GateConfig,
    owners: dict[str, str],
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with the gate of this folder, by its config.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List the cells in their order, and what is left out, and stop.")
    ] = False,
    json: JsonOption = None,
    junit: Annotated[
        Path | None, typer.Option("--junit", metavar="FILE", help="Also write JUnit XML, one case per cell.")
    ] = None,
    html: HtmlOption = None,
) -> int:
    """Decide on a release: a matrix of judged runs, and PASS, FAIL or INCONCLUSIVE."""
    from verifier.cli import gated_release

    if resume is not None:
        if owners.get("folder", "--config").startswith(("--folder", "folder=")):
            raise UsageError("--resume and --folder both name the folder of the gate: leave one of the two out")
        config = replace(config, folder=resume)
    require_results(json, junit, html)
    if dry_run:
        return gated_release.dry_run(config)
    from verifier.report.progress import shown_progress

    with shown_progress("gate") as progress:
        return gated_release.gate(config, progress, json=json, junit=junit, html=html)
