"""The command `verifier bisect`, without what it needs to run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from verifier.config import BisectConfig


def bisect(
    config: BisectConfig,
    traces: list[Path] | None = None,
    verbose: Annotated[
        bool, typer.Option("--verbose", "-v", help="Print every point, not those around the first difference alone.")
    ] = False,
) -> int:
    """Name the first layer and module whose output or gradient differs from transformers', or between two TRACES."""
    from verifier.cli import bisected

    return bisected.judge(traces, verbose=verbose) if traces else bisected.run(config, verbose=verbose)
