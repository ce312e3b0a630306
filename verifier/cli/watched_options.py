"""Options of `--watch`, without what the loop needs to run."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated

import typer

from verifier.config import GoldenConfig, RoundtripConfig
from verifier.errors import UsageError

WatchOption = Annotated[
    bool, typer.Option("--watch", help="Judge again whenever a row, a mapping or the checkpoint changes; Ctrl-C ends.")
]
WatchPathOption = Annotated[
    list[Path] | None,
    typer.Option("--watch-path", metavar="PATH", help="With --watch: also watch this file or folder; repeatable."),
]


def watched(watch: bool, paths: Sequence[Path] | None) -> bool:
    """Test for a command that is to be run in rounds.

    Raises:
        UsageError: paths to watch are given, and the command runs once.
    """
    if paths and not watch:
        raise UsageError("--watch-path goes with --watch: give both, or neither")
    return watch


def in_rounds(
    config: GoldenConfig | RoundtripConfig, paths: Sequence[Path] | None, results: Collection[Path | None]
) -> int:
    """Run the command in rounds; see `verifier.cli.watched.loop`."""
    from verifier.cli.watched import loop

    return loop(config, paths, results)
