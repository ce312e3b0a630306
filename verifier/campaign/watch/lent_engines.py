"""A round's end of what the loop keeps for it: its engines, and what its oracle has answered."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from verifier.engine.api import EngineConfig
from verifier.engine.client import EngineClient, EngineGone
from verifier.errors import InternalError, VerifierError
from verifier.launch.channel import Channel, ChannelClosed, DeadlinePassed
from verifier.launch.child import Child, end_of
from verifier.launch.vigil import Vigil
from verifier.oracle.oracle import Oracle
from verifier.probes.engine_state import EngineState, held_by
from verifier.runs.resources import Deadline, Resources, RunningEngine

_LISTEN_S = 60.0


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
        until = Deadline(_LISTEN_S)
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
    """Resources of one round, warm ones: ranks and oracle are forked for it, and its engines are the loop's.

    Args:
        channel: to the loop.
        answers: file of what oracles of earlier rounds have answered, and of what this one does.
        given: see `Resources`.
    """

    def __init__(self, channel: Channel, answers: Path, **given: Any) -> None:
        super().__init__(warm=True, **given)
        self._answers = answers
        self._channel, self._lent_engines = channel, dict[EngineConfig, RunningEngine]()
        self.failed = False
        """A run on them broke, and may have left an engine in any state."""

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self.failed = self.failed or kind is not None
        if self._oracle is not None and not self.failed:
            self._answers.write_text(json.dumps(self._oracle.answers))
        super().__exit__(kind, *rest)

    def oracle(self, checkpoint: Path, until: Deadline) -> Oracle:
        """See `Resources.oracle`; one that knows what was answered before."""
        known = self._oracle is not None
        oracle = super().oracle(checkpoint, until)
        if not known and self._answers.is_file():
            oracle.answers.update(json.loads(self._answers.read_text()))
        return oracle

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
