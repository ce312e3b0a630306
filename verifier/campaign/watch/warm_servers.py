"""The processes that keep libraries imported between rounds, and what one round is lent of them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from verifier.engine.process import ONE_THREAD, VLLM_ENVIRONMENT
from verifier.errors import InternalError
from verifier.launch.channel import Channel, ChannelClosed, DeadlinePassed
from verifier.launch.child import Child
from verifier.launch.fork_server import ForkServer

_ASK_S = 60.0
_END_S = 10.0
"""Seconds that a round has to end what it started, once it is asked to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Libraries:
    """Imports of one of the processes, and those of its children after the fork, which are of this package."""

    name: str
    preloads: tuple[str, ...]
    then: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)


RANKS = Libraries(
    name="Megatron",
    preloads=("verifier.launch.rank:preload", "verifier.campaign.watch.libraries_megatron:preload"),
    then=("verifier.runs.session_megatron:preload",),
    environment={"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"},
)
ENGINES = Libraries(
    name="vLLM",
    preloads=("verifier.campaign.watch.libraries_vllm:preload",),
    then=("verifier.engine.server:preload",),
    environment={**VLLM_ENVIRONMENT, **ONE_THREAD},
)
ORACLES = Libraries(
    name="transformers",
    preloads=("verifier.campaign.watch.libraries_hf:preload",),
    environment={**VLLM_ENVIRONMENT, **ONE_THREAD},
)


class WarmServer:
    """A fork server with libraries alone, of which every round gets a fork of its own."""

    def __init__(self, libraries: Libraries, load_deadline_s: float) -> None:
        self.libraries, self._load_deadline_s = libraries, load_deadline_s
        self._loaded: frozenset[str] = frozenset()
        """Files of the modules that it has imported, once it was asked."""
        self.started = False
        self.server = self._new()

    def _new(self) -> ForkServer:
        item = self.libraries
        return ForkServer(
            *item.preloads, name=f"the process that keeps {item.name}",
            environment={**os.environ, **item.environment}, load_deadline_s=self._load_deadline_s,
        )  # fmt: skip

    def start(self) -> None:
        """Begin to import, unless that was begun."""
        self.server.start()
        self.started = True

    def lend(self, log: Path) -> tuple[Child, Channel]:
        """Fork a fork server for one round, which imports our modules as they are now."""
        arguments = {"preloads": list(self.libraries.then)}
        return self.server.fork("verifier.campaign.watch.forks:serve", arguments, log_path=log)

    def note(self, changed: Collection[Path], log: Path) -> bool:
        """End the process if it has loaded one of these files; True if so: the next round imports all again."""
        if not self._loaded:
            child, channel = self.server.fork("verifier.campaign.watch.forks:tell", {}, log_path=log)
            try:
                self._loaded = frozenset(channel.receive(_ASK_S))
            except (ChannelClosed, DeadlinePassed) as problem:
                raise InternalError(f"{self.libraries.name}'s process does not say what it has loaded") from problem
            finally:
                channel.close()
                child.stop()
        if self._loaded.isdisjoint(str(path.resolve()) for path in changed):
            return False
        self.close()
        return True

    def close(self) -> None:
        """End it with all its children; `start` begins anew."""
        self.server.close()
        self._loaded, self.started, self.server = frozenset(), False, self._new()


class WarmServers(contextlib.AbstractContextManager["WarmServers"]):
    """All of them that a command needs; nothing is left of them, nor of a round, after `with`. Logs go to `folder`.

    `wanted` has libraries by the name under which a round is lent them; a round is forked from "oracles" itself.
    """

    def __init__(self, wanted: Mapping[str, Libraries], folder: Path, load_deadline_s: float) -> None:
        self._folder = folder
        self._servers = {name: WarmServer(item, load_deadline_s) for name, item in wanted.items()}

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """End all of them; the next round begins anew."""
        for server in self._servers.values():
            server.close()

    def missing(self) -> list[str]:
        """Libraries that no process has begun to import, as before the first round."""
        return [item.libraries.name for item in self._servers.values() if not item.started]

    def note(self, changed: Collection[Path]) -> list[str]:
        """See `WarmServer.note`; returns the libraries that will be imported again."""
        log = self._folder / "looks.log"
        return [item.libraries.name for item in self._servers.values() if item.note(changed, log)]

    def play(self, function: str, arguments: Mapping[str, Any], deadline_s: float, fds: Sequence[int]) -> Any:
        """Run a function in a process that has imported nothing of ours but what a fork needs; returns what it sends.

        Args:
            function: "package.module:function"; it gets its channel, `fds`, a descriptor for each server that it is
                lent, the arguments, and `lent`: for each of them, in order, name, process id and log.
            arguments: JSON values.
            deadline_s: seconds that it may take.
            fds: descriptors that it gets.

        Raises:
            InternalError: it died or did not end in time.
        """
        for server in self._servers.values():
            server.start()
        with contextlib.ExitStack() as stack:
            lent, wires = [], []
            for name, server in self._servers.items():
                log = self._folder / f"{name}.log"
                log.write_bytes(b"")
                child, channel = server.lend(log)
                stack.callback(child.stop, _END_S)
                stack.callback(channel.close)
                lent.append({"name": name, "pid": child.pid, "log": str(log)})
                wires.append(channel)
            log = self._folder / "round.log"
            numbers = [*fds, *(wire.fileno() for wire in wires)]
            oracles = self._servers["oracles"].server
            player, told = oracles.fork(function, {**arguments, "lent": lent}, log_path=log, fds=numbers)
            stack.callback(player.stop, _END_S)
            stack.callback(told.close)
            for wire in wires:
                wire.close()  # the round has its own
            try:
                return told.receive(deadline_s)
            except DeadlinePassed:
                raise InternalError(f"the round did not end within {deadline_s:g} s") from None
            except ChannelClosed:
                cause = player.cause_of_death() if player.ended(_END_S) else "without an exit status"
                raise InternalError(f"the round's process ended by itself ({cause})") from None
