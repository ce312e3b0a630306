"""Talk to an engine in its own process, from any process that knows its socket. Torch-free."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from multiprocessing import AuthenticationError, connection
from pathlib import Path
from typing import Any

import msgspec

from verifier.engine.api import EngineSlice, EngineTensor, Poisoned, Sample, Sampling, value_of
from verifier.errors import InternalError
from verifier.launch.channel import Channel, ChannelClosed, DeadlinePassed, wrapped
from verifier.launch.child import last_lines
from verifier.launch.watchdog import Vigil
from verifier.plan.chunk_plan import ChunkPlan
from verifier.transport.wire import Address, Agreement, Receipt

HELLO_S = 10.0
"""Seconds that either side of a TCP connection may take to prove that it knows the key."""
_DEATH_S = 0.5
"""Seconds from the end of a connection to the end of its process, which knows the signal."""


def is_far(place: Path | str) -> bool:
    """True for an engine on another node, which is reached by TCP, as KEY@HOST:PORT; others have a Unix socket."""
    return not str(place).startswith("/")


def _admitted(key: str, where: str) -> connection.Connection:
    """Connect to a server at HOST:PORT; each side proves that it knows the key."""
    host, _, port = where.rpartition(":")
    wire = wrapped(socket.create_connection((host, int(port)), HELLO_S), HELLO_S)
    connection.answer_challenge(wire, key.encode())
    connection.deliver_challenge(wire, key.encode())
    return wire


class EngineGone(InternalError):
    """The engine's process died or does not listen; carries the last lines of its log."""


class EngineClient:
    """One connection to an engine server. Requests are answered in their order; not for several threads.

    The engine's `place` is its socket, or what its server has answered to `listen`. Errors call it `name`, and quote
    its log beside the socket. `deadline_s` holds for requests that name none. The death of a process that `vigil`
    watches ends every wait.
    """

    def __init__(
        self, place: Path | str, deadline_s: float = 300, name: str = "the engine", vigil: Vigil | None = None
    ) -> None:
        self._name, self._deadline_s, self._vigil = name, deadline_s, vigil or Vigil()
        key, where = ("", str(place)) if not is_far(place) else str(place).split("@")
        self._log = Path(where).with_name("engine.log") if not key else Path()
        self._channel: Channel | None = None
        try:
            self._channel = Channel(_admitted(key, where) if key else connection.Client(where, "AF_UNIX"))
        except (AuthenticationError, EOFError, OSError) as error:
            why = f"{getattr(error, 'strerror', None) or error}{last_lines(self._log)}"
            raise EngineGone(f"{name} does not listen at {where}: {why}") from error

    def start(
        self, request: str, kind: Any = None, *, deadline_s: float | None = None, **arguments: Any
    ) -> Callable[[], Any]:
        """Send a request, one of the methods of `Engine`, and return at once, so that the engine can be fed meanwhile.

        The function returned waits for the answer, of type `kind`, as `ask` does; call them in the order of requests.
        """
        try:
            self._connected(f"before the request `{request}`").send({"request": request, "arguments": arguments})
        except ChannelClosed as error:
            raise self._gone(request) from error
        return partial(self._answer, request, kind, deadline_s or self._deadline_s)

    def ask(self, request: str, kind: Any = None, *, deadline_s: float | None = None, **arguments: Any) -> Any:
        """Send a request, as `start` does, and wait for its answer.

        Raises:
            InternalError: no answer in time.
            EngineGone: the engine's process died.
            VerifierError: what the engine refused, as it raised it.
        """
        return self.start(request, kind, deadline_s=deadline_s, **arguments)()

    def wait_ready(self, deadline_s: float) -> int:
        """Wait until the model is loaded; the number of engine ranks."""
        return self.ask("num_ranks", int, deadline_s=deadline_s)

    def logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """See `Engine.logprobs`."""
        return self.ask("logprobs", list[list[float]], sequences=[list(item) for item in sequences])

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Sample]]:
        """See `Engine.generate`."""
        tokens = [list(item) for item in prompts]
        return self.ask("generate", list[list[Sample]], prompts=tokens, sampling=asdict(sampling))

    def begin_batch(self, prompts: Sequence[Sequence[int]], sampling: Sampling, steps: int) -> None:
        """See `Engine.begin_batch`."""
        self.ask("begin_batch", prompts=[list(item) for item in prompts], sampling=asdict(sampling), steps=steps)

    def finish_batch(self) -> list[list[Sample]]:
        """See `Engine.finish_batch`."""
        return self.ask("finish_batch", list[list[Sample]])

    def state(self) -> list[list[EngineTensor]]:
        """See `Engine.state`."""
        return self.ask("state", list[list[EngineTensor]])

    def checkpoint_view(self) -> list[list[EngineSlice]]:
        """See `Engine.checkpoint_view`."""
        return self.ask("checkpoint_view", list[list[EngineSlice]])

    def poison(self) -> list[list[Poisoned]]:
        """See `Engine.poison`."""
        return self.ask("poison", list[list[Poisoned]])

    def connect(self, address: Address) -> Callable[[], None]:
        """See `Engine.connect`; take the answer after the sender has accepted."""
        return self.start("connect", deadline_s=address.deadline_s + 30, address=asdict(address))

    def begin_update(self, plan: ChunkPlan) -> Callable[[], list[Agreement]]:
        """See `Engine.begin_update`; take the answer after the sender has agreed."""
        return self.start("begin_update", list[Agreement], plan=plan.to_json())

    def receive(self, chunk: int) -> Callable[[], list[Receipt]]:
        """See `Engine.receive`; take the answer after the sender has sent."""
        return self.start("receive", list[Receipt], chunk=chunk)

    def finish_update(self, version: int) -> None:
        """See `Engine.finish_update`."""
        self.ask("finish_update", version=version)

    def reset_prefix_cache(self, running: bool = False) -> bool:
        """See `Engine.reset_prefix_cache`."""
        return self.ask("reset_prefix_cache", bool, running=running)

    def load_adapter(self, path: Path) -> None:
        """See `Engine.load_adapter`."""
        self.ask("load_adapter", path=str(path))

    def sleep(self, level: int) -> None:
        """See `Engine.sleep`."""
        self.ask("sleep", level=level)

    def wake_up(self, tag: str) -> None:
        """See `Engine.wake_up`."""
        self.ask("wake_up", tag=tag)

    def call(self, function: str, *arguments: Any) -> list[Any]:
        """See `Engine.call`."""
        return self.ask("call", list[Any], function=function, arguments=arguments)

    def call_driver(self, function: str, *arguments: Any) -> Any:
        """See `Engine.call_driver`."""
        return self.ask("call_driver", Any, function=function, arguments=arguments)

    @property
    def descriptor(self) -> int | None:
        """Descriptor of the connection; None once it is closed."""
        return None if self._channel is None else self._channel.fileno()

    def speaks(self, within_s: float) -> bool:
        """Wait at most so many seconds for an answer, or the end of the connection; True if it can be read."""
        return self.descriptor is None or bool(connection.wait([self.descriptor], within_s))

    def close(self) -> None:
        """Close this connection; the engine stays."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _answer(self, request: str, kind: Any, deadline_s: float) -> Any:
        try:
            reply = self._connected(f"during the request `{request}`").receive(deadline_s, self._vigil)
        except DeadlinePassed as error:
            self.close()
            raise InternalError(
                f"{self._name} did not answer `{request}` within {deadline_s:g} s{last_lines(self._log)}"
            ) from error
        except ChannelClosed as error:
            raise self._gone(request) from error
        return msgspec.convert(value_of(reply, f"{self._name} failed in `{request}`", party=self._name), kind)

    def _connected(self, when: str) -> Channel:
        if self._channel is None:
            raise EngineGone(f"the connection to {self._name} was closed {when}")
        return self._channel

    def _gone(self, request: str) -> EngineGone:
        self.close()
        self._vigil.look(_DEATH_S)
        return EngineGone(f"{self._name}'s process ended during the request `{request}`{last_lines(self._log)}")
