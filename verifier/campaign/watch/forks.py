"""Functions of the forks of a process that keeps libraries: the files that it has loaded, and a fork server."""

from __future__ import annotations

import os
import sys
from functools import partial

from verifier.launch.channel import Channel
from verifier.launch.fork_server import be_server, call


def tell(channel: Channel) -> None:
    """Send the files of all modules that are loaded here, links resolved."""
    files = (getattr(module, "__file__", None) for module in list(sys.modules.values()))
    channel.send(sorted({os.path.realpath(file) for file in files if file}))


def serve(channel: Channel, preloads: list[str]) -> None:
    """Be a fork server that was forked from another."""
    be_server(channel, [partial(call, name) for name in preloads])
