"""`--watch`: the same command again whenever a file changes, with the heavy libraries kept imported."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from verifier.campaign.watch import changes
from verifier.campaign.watch.warm_servers import ENGINES, ORACLES, RANKS, WarmServers
from verifier.cli.results import Results, complain, show
from verifier.config import GoldenConfig, RoundtripConfig
from verifier.core import store
from verifier.core.outputs import sweep, work_folder
from verifier.errors import UsageError, VerifierError

_LEAST_DEADLINE_S = 300.0
"""Seconds over `--timeout` that a round may take, for checks and for what comes to an end."""
_LOOP = (
    "verifier.cli.watch", "verifier.errors", "verifier.engine.process", "verifier.launch", "verifier.campaign.watch",
)  # fmt: skip
"""Modules that the loop's own process runs, whose change starts it anew; of others it needs nothing that moves."""
_NAMED = 3
"""Changed files that are named."""


def loop(config: GoldenConfig | RoundtripConfig, paths: Sequence[Path] | None, results: Results) -> int:
    """Run the command that this process was started with in rounds, until a signal ends it.

    Raises:
        UsageError: what was asked makes no sense in rounds.
    """
    if results.takes_stdout:
        raise UsageError("--watch prints the text of each round: give --json, --junit and --html a file")
    if isinstance(config, GoldenConfig) and config.record:
        raise UsageError("--watch would record a manifest in each round: use --record without it")
    if config.ray.use:
        raise UsageError("--watch keeps the processes of one host, and ray.use starts ranks on nodes: leave one out")
    for path in paths or ():
        if not path.exists():
            raise UsageError(f"--watch-path names `{path}`, which does not exist")
    roots = _roots(config, paths or ())
    wanted = {"launcher": RANKS, "oracles": ORACLES}
    if isinstance(config, RoundtripConfig) and config.engine.kind == "vllm":
        wanted["engines"] = ENGINES
    with work_folder("watch") as folder, WarmServers(wanted, folder, config.timeout_s) as servers:
        try:
            _rounds(config, roots, servers)
        finally:
            sweep()
    return 0  # never: a signal ends it


def _roots(config: GoldenConfig | RoundtripConfig, paths: Sequence[Path]) -> list[Path]:
    """Files and folders to watch: this package, megatron-bridge's models, a local checkpoint, files that are read."""
    found = [Path(__file__).resolve().parents[1]]
    with contextlib.suppress(metadata.PackageNotFoundError):  # the first round says so
        found.append(Path(str(metadata.distribution("megatron-bridge").locate_file("megatron/bridge/models"))))
    if Path(config.model).is_dir():
        found.append(Path(config.model))
    found += [Path(word) for word in sys.argv[1:] if word.endswith((".yaml", ".yml", ".json")) and Path(word).is_file()]
    if isinstance(config, GoldenConfig) and config.against is not None:
        found.append(config.against)
    return [*dict.fromkeys(path.resolve() for path in [*found, *paths])]


def _rounds(config: GoldenConfig | RoundtripConfig, roots: Sequence[Path], servers: WarmServers) -> None:
    def look() -> dict[Path, changes.Stamp]:
        return changes.stamps(roots)

    seen, number = look(), 0
    edited: set[Path] = set()
    verdicts: Mapping[str, str] = {}
    show(f"watch: {len(seen)} files in {', '.join(f'`{path}`' for path in roots)}; Ctrl-C ends\n\n")
    while True:
        number += 1
        began = time.monotonic()
        try:
            imported = servers.missing()
            if edited and not imported:
                imported = servers.note(edited)
            judged = _play(config, servers, edited=number > 1)
        except VerifierError as problem:
            complain(str(problem))
            servers.close()
            show(f"\nwatch: round {number} broke; the next one imports all libraries again\n")
        else:
            libraries = f", with the import of {', '.join(imported)}" if imported else ""
            took = f"{time.monotonic() - began:.1f} s{libraries}"
            show(f"\nwatch: round {number} took {took}{_news(verdicts, judged)}\n")
            verdicts = judged or verdicts
        edited, seen = _edited(seen, look)
        store.discard(config.trace)
        loops = (module.__file__ or "" for name, module in sys.modules.items() if name.startswith(_LOOP))
        if edited & {Path(os.path.realpath(file)) for file in loops}:
            show("watch: that is the loop's own code, which starts anew\n")
            servers.close()
            os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:]])  # noqa: S606 - this very command


def _edited(
    seen: dict[Path, changes.Stamp], look: Callable[[], dict[Path, changes.Stamp]]
) -> tuple[set[Path], dict[Path, changes.Stamp]]:
    """Wait for changes that Python can read; returns the changed files, and the stamps of all."""
    edited: set[Path] = set()
    while True:
        show("watch: waiting for a change\n")
        changed, seen = changes.next_change(seen, look)
        edited.update(changed)
        more = f" and {len(changed) - _NAMED} more" if len(changed) > _NAMED else ""
        show(f"\nwatch: {', '.join(f'`{path.name}`' for path in changed[:_NAMED])}{more} changed\n")
        if not (errors := changes.syntax_errors(sorted(edited))):
            return edited, seen
        for sentence in errors:
            complain(f"not judged, for Python cannot read it: {sentence}")


def _play(config: GoldenConfig | RoundtripConfig, servers: WarmServers, *, edited: bool) -> Mapping[str, str]:
    """One round, in a process of its own that prints to where this one does; its verdicts, by the checks' codes."""
    words = _without_watch(sys.argv[1:])
    if not any(word.startswith(("--trace", "trace=")) for word in words):
        words.append(f"trace={config.trace}")
    arguments = {"words": words, "environment": dict(os.environ), "write_caches": not edited}
    deadline_s = config.timeout_s + _LEAST_DEADLINE_S
    verdicts: Mapping[str, str] = servers.play("verifier.cli.watch_round:play", arguments, deadline_s, [1, 2])
    return verdicts


def _without_watch(words: Sequence[str]) -> list[str]:
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--watch", action="store_true")
    parser.add_argument("--watch-path", action="append")
    return parser.parse_known_args(words)[1]


def _news(before: Mapping[str, str], now: Mapping[str, str]) -> str:
    if not now:
        return "; nothing was judged"
    if not before:
        return ""
    moved: dict[str, list[str]] = {}
    for code in sorted(before.keys() | now.keys()):
        if before.get(code) != now.get(code):
            moved.setdefault(now.get(code, "not judged"), []).append(code)
    said = [f"newly {verdict}: {', '.join(codes)}" for verdict, codes in moved.items()]
    return "; " + ("; ".join(said) or "no verdict changed")
