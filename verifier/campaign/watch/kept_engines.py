"""Engines and answers of the oracle that outlive a round, until a change may be in them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from verifier.campaign.watch.imports import reached
from verifier.campaign.watch.warm_servers import WarmServer
from verifier.engine.api import EngineConfig
from verifier.engine.process import EngineProcess
from verifier.launch.fork_server import ForkServer, Lent

_PACKAGE = Path(__file__).resolve().parents[2]


def engine_code() -> set[Path]:
    """Files of this package that an engine's processes may have loaded."""
    return reached((_PACKAGE / "engine").rglob("*.py"))


def oracle_code() -> set[Path]:
    """Files of this package that the oracle's process may have loaded."""
    return reached([_PACKAGE / "engine" / "server.py", *(_PACKAGE / "oracle").glob("*_hf.py")])


class KeptBetweenRounds:
    """Engines of the last rounds, by their configs as JSON; each kind forked from a server of its own.

    Args:
        servers: what is forked for each kind of engine.
        folder: for logs.
    """

    def __init__(self, servers: Mapping[str, WarmServer], folder: Path) -> None:
        self._servers, self._folder = servers, folder
        self.answers = folder / "answers.json"
        """File of what the oracle has answered."""
        self._stack = contextlib.ExitStack()
        self._forks: dict[str, ForkServer] = {}
        self._engines: dict[str, tuple[EngineProcess, Any]] = {}

    def answer(self, request: Mapping[str, Any]) -> Any:
        """Answer a round: the socket of an engine, started if there is none; or keep what one held at its start."""
        key = request["engine"]
        if "loaded" in request:
            self._engines[key] = self._engines[key][0], request["loaded"]
            return None
        config = msgspec.json.decode(key, type=EngineConfig)
        if config.lora_rank and key in self._engines:  # the adapter stays loaded
            self._engines.pop(key)[0].stop()
        if key not in self._engines:
            process = EngineProcess(config, fork_server=self._fork(config.kind), forks=(config.kind,))
            self._stack.callback(process.stop)
            self._engines[key] = process, None
        process, loaded = self._engines[key]
        return {"socket": str(process.socket_path), "pid": process.pid, "loaded": loaded}

    def _fork(self, kind: str) -> ForkServer:
        if kind not in self._forks:
            log = self._folder / f"engines-{kind}.log"
            log.write_bytes(b"")
            child, channel = self._servers[kind].lend(log)
            self._stack.callback(child.stop, 5.0)
            lent = Lent(pid=child.pid, fd=os.dup(channel.fileno()), log=log)
            channel.close()
            server = self._stack.enter_context(ForkServer(name="the process that forks engines", lent=lent))
            self._forks[kind] = server
        return self._forks[kind]

    def note(self, changed: Collection[Path], checkpoint: Path | None) -> None:
        """End and forget what one of these files may be in: the code that it ran, or the checkpoint."""
        inside = checkpoint is not None and any(path.is_relative_to(checkpoint.resolve()) for path in changed)
        if inside or not engine_code().isdisjoint(changed):
            self._end_engines()
        if not oracle_code().isdisjoint(changed):
            self.answers.unlink(missing_ok=True)

    def close(self) -> None:
        """End the engines, and forget the answers."""
        self._end_engines()
        self.answers.unlink(missing_ok=True)

    def _end_engines(self) -> None:
        self._stack.close()
        self._forks, self._engines = {}, {}
