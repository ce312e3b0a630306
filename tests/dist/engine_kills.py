"""Ends of an engine's process at a chosen moment of a training run, once."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verifier.engine.client import EngineClient
from verifier.engine.replicas import EngineReplicas
from verifier.launch.rank import RankContext
from verifier.trainer.ranks import WorkerSpec


def peer(client: EngineClient) -> int:
    """Process id of the engine that a client is connected to."""
    assert client.descriptor is not None
    with socket.socket(fileno=os.dup(client.descriptor)) as wire:
        return struct.unpack("3i", wire.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))[0]


@contextlib.contextmanager
def killed(request: str, number: int, times: int = 1) -> Iterator[list[int]]:
    """Kill the engine right after a request of this name was sent to it, at its so manieth time, and at the next ones.

    Args:
        request: a method of `Engine`.
        number: from 1, of all clients of this process.
        times: kills in a row.
    """
    seen, pids, start = 0, list[int](), EngineClient.start

    def killing(self: EngineClient, name: str, *arguments: Any, **others: Any) -> Any:
        nonlocal seen
        answer = start(self, name, *arguments, **others)
        if name == request and not isinstance(self, EngineReplicas):
            seen += 1
            if number <= seen < number + times:
                pids.append(peer(self))
                os.kill(pids[-1], signal.SIGKILL)
        return answer

    EngineClient.start = killing  # type: ignore[method-assign]
    try:
        yield pids
    finally:
        EngineClient.start = start  # type: ignore[method-assign]


@contextlib.contextmanager
def killed_by_rank_0(spec: WorkerSpec, context: RankContext, request: str, number: str, mark: str) -> Iterator[None]:
    """`killed` in rank 0, which leaves a mark; see `WorkerSpec.within`."""
    if context.rank:
        yield
        return
    with killed(request, int(number)) as pids:
        yield
    Path(mark).write_text(str(len(pids)))
