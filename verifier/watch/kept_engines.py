"""Engines that outlive the round that asked for them: the loop's side, which owns them, and a round's."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import msgspec

from verifier.engine.api import EngineConfig
from verifier.engine.client import EngineClient, EngineGone
from verifier.engine.process import EngineProcess
from verifier.errors import InternalError, VerifierError
from verifier.launch.channel import Channel, ChannelClosed, DeadlinePassed
from verifier.launch.child import Child, end_of
from verifier.launch.fork_server import ForkServer, Lent
from verifier.launch.vigil import Vigil
from verifier.probes.engine_state import EngineState, held_by
from verifier.runs.resources import Deadline, Resources, RunningEngine
from verifier.watch.imports import reached
from verifier.watch.warm_servers import WarmServer

ENGINE_FOLDER = Path(__file__).resolve().parents[1] / "engine"


class KeptEngines:
    """Engines of the last rounds, by their configs as JSON; each kind forked from a server of its own.

    Args:
        servers: what is forked for each kind of engine.
        folder: for logs.
    """

    def __init__(self, servers: Mapping[str, WarmServer], folder: Path) -> None:
        self._servers, self._folder = servers, folder
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
        """End the engines if one of these files may be in them: code that they run, or the checkpoint."""
        code = reached(ENGINE_FOLDER.rglob("*.py"))
        inside = checkpoint is not None and any(path.is_relative_to(checkpoint.resolve()) for path in changed)
        if inside or any(path in code for path in changed):
            self.close()

    def close(self) -> None:
        """End all of them."""
        self._stack.close()
        self._forks, self._engines = {}, {}


class LentEngine:
    """A round's end of a kept engine; what a round does of `EngineProcess`."""

    def __init__(self, config: EngineConfig, socket_path: Path, pid: int, vigil: Vigil) -> None:
        self.config, self.socket_path, self.pid, self._vigil = config, socket_path, pid, vigil
        try:
            vigil.keep(Child(pid, lambda: None), self.death)
        except ProcessLookupError:
            raise self.death() from None

    def client(self, deadline_s: float = 300) -> EngineClient:
        """See `EngineProcess.client`; it listens already, or will within moments."""
        until = Deadline(60.0)
        while True:
            if self.socket_path.exists():
                with contextlib.suppress(EngineGone):
                    return EngineClient(self.socket_path, deadline_s, "the engine", self._vigil)
            self._vigil.look(0.02)
            until.left("the engine listened")

    def death(self) -> VerifierError:
        """See `EngineProcess.death`."""
        return EngineGone("the engine's process ended by itself")

    def log(self) -> bytes:
        """See `EngineProcess.log`."""
        return end_of(self.socket_path.with_name("engine.log"))

    def hasten(self) -> None:
        """Nothing: the loop ends it."""

    def stop(self) -> None:
        """Nothing: the loop ends it."""


class RoundResources(Resources):
    """Resources of one round, warm ones: ranks and oracle are forked for it, and its engines are the loop's."""

    def __init__(self, channel: Channel, **given: Any) -> None:
        super().__init__(warm=True, **given)
        self._channel, self._lent_engines = channel, dict[EngineConfig, RunningEngine]()
        self.failed = False
        """A run on them broke, and may have left an engine in any state."""

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.failed = self.failed or kind is not None
        super().__exit__(kind, *rest)

    def engine(self, config: EngineConfig, until: Deadline, name: str = "the engine") -> RunningEngine:
        """See `Resources.engine`."""
        if config not in self._lent_engines:
            key = msgspec.json.encode(config).decode()
            found = self._ask({"engine": key}, until)
            process: Any = LentEngine(config, Path(found["socket"]), found["pid"], self._vigil)
            self._started.append(process)
            with contextlib.closing(process.client(until.left(f"{name} listened"))) as client:
                client.wait_ready(until.left(f"{name} had started"))
                loaded = msgspec.convert(found["loaded"], EngineState) if found["loaded"] else held_by(client)
            if not found["loaded"]:
                self._ask({"engine": key, "loaded": msgspec.to_builtins(loaded)}, until)
            self._lent_engines[config] = RunningEngine(process=process, loaded=loaded)
        return self._lent_engines[config]

    def _ask(self, request: Mapping[str, Any], until: Deadline) -> Any:
        try:
            self._channel.send(request)
            reply = self._channel.receive(until.left("the loop answered"))
        except (ChannelClosed, DeadlinePassed) as problem:
            raise InternalError("the loop that keeps the engines does not answer") from problem
        if "refused" in reply:
            raise InternalError(reply["refused"])
        return reply["answer"]
