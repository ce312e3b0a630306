"""One round of `--watch` in a forked process, which imports this package as it is now."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verifier.launch.channel import Channel
from verifier.launch.fork_server import Lent
from verifier.launch.stopping import stop_at

if TYPE_CHECKING:
    from verifier.runs.resources import Resources


def play(
    channel: Channel, out: int, err: int, *fds: int, words: list[str], environment: dict[str, str],
    write_caches: bool, lent: list[dict[str, Any]],
) -> None:  # fmt: skip
    """Run one command, whose output goes to the descriptors `out` and `err`, and send the verdict of each check.

    `fds` are the channels of the fork servers that are `lent`. Python keeps what it compiles with `write_caches` alone:
    its caches know a source by bytes and whole seconds, so those of one edit may be taken for those of the next.
    """
    os.dup2(out, 1)
    os.dup2(err, 2)
    stop_at(signal.SIGTERM, before=lambda: os.dup2(os.open(os.devnull, os.O_WRONLY), 2))  # the loop says why
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [sys.argv[0], *words]
    sys.dont_write_bytecode = not write_caches
    found = {
        item["name"]: Lent(pid=item["pid"], fd=fd, log=Path(item["log"])) for fd, item in zip(fds, lent, strict=True)
    }
    verdicts: dict[str, str] = {}
    _command(words, partial(_resources, found), verdicts)
    channel.send(verdicts)


def _command(words: Sequence[str], lend: Callable[[], Resources], verdicts: dict[str, str]) -> None:
    try:
        from verifier.cli import results
        from verifier.cli.app import run
        from verifier.runs import resources
    except Exception as problem:
        print(f"verifier: the edited code cannot be imported: {_where(problem)}", file=sys.stderr, flush=True)
        return
    results.LISTENERS.append(
        lambda report: verdicts.update({item.code: item.verdict.name.lower() for item in report.outcomes})
    )
    resources.LENT.set(lend)
    run(list(words))


def _where(problem: Exception) -> str:
    frames = traceback.extract_tb(problem.__traceback__)
    place = f" (`{frames[-1].filename}`, line {frames[-1].lineno})" if frames else ""
    return f"{type(problem).__name__}: {problem}{place}"


def _resources(lent: dict[str, Lent]) -> Resources:
    from verifier.launch.fork_launcher import ForkLauncher
    from verifier.launch.fork_server import ForkServer
    from verifier.launch.watchdog import Vigil
    from verifier.runs.resources import Resources

    vigil = Vigil()
    launcher = ForkLauncher(lent=lent.pop("launcher"), vigil=vigil)
    names = {"oracles": "the process that forks the oracle", "engines": "the process that forks engines"}
    servers = {key: ForkServer(name=names[key], vigil=vigil, lent=item) for key, item in lent.items()}
    for server in (launcher, *servers.values()):
        server.start()
    return Resources(launcher=launcher, oracles=servers["oracles"], engines=servers.get("engines"))
