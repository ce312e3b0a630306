"""Talk to an engine in its own process, from any process that knows its socket. Torch-free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from multiprocessing import connection
from pathlib import Path
from typing import Any

import msgspec

from verifier.engine.api import EngineSlice, EngineTensor, Generation, Poisoned, Sampling
from verifier.engine.error_records import raise_record
from verifier.errors import InternalError
from verifier.launch.channel import Channel, ChannelClosed, DeadlinePassed
from verifier.launch.child import last_lines
from verifier.plan.chunk_plan import ChunkPlan
from verifier.transport.wire import Address, Agreement, Receipt


class EngineGone(InternalError):
    """The engine's process died or does not listen; carries the last lines of its log."""


class EngineTimeout(InternalError):
    """The engine did not answer before the request's deadline."""


class Pending:
    """A request under way. Between `EngineClient.start` and `result` the caller may feed the engine by other means."""

    def __init__(self, client: EngineClient, request: str, deadline_s: float) -> None:
        self._client = client
        self._request = request
        self._deadline_s = deadline_s

    def result(self) -> Any:
        """The engine's answer, or its error raised here."""
        return self._client.answer(self._request, self._deadline_s)


class EngineClient:
    """One connection to an engine server. Requests are answered in their order; not for several threads.

    Args:
        socket_path: where the server listens.
        log_path: the server's log, quoted in errors.
        deadline_s: for each request that names none.
        name: what errors call it.
    """

    def __init__(
        self,
        socket_path: Path | str,
        log_path: Path | str | None = None,
        deadline_s: float = 300,
        name: str = "the engine",
    ) -> None:
        self._name = name
        self.socket_path = Path(socket_path)
        self.log_path = Path(log_path) if log_path else self.socket_path.with_name("engine.log")
        self.deadline_s = deadline_s
        self._channel: Channel | None = None
        try:
            self._channel = Channel(connection.Client(str(self.socket_path), "AF_UNIX"))
        except OSError as error:
            why = f"{error.strerror}{last_lines(self.log_path)}"
            raise EngineGone(f"{name} does not listen at {self.socket_path}: {why}") from error

    def start(self, request: str, *, deadline_s: float | None = None, **arguments: Any) -> Pending:
        """Send a request and return at once; results are taken in the order of the requests."""
        if self._channel is None:
            raise EngineGone(f"the connection to {self._name} was closed before the request `{request}`")
        try:
            self._channel.send({"request": request, "arguments": arguments})
        except ChannelClosed as error:
            raise self._gone(request) from error
        return Pending(self, request, deadline_s or self.deadline_s)

    def ask(self, request: str, *, deadline_s: float | None = None, **arguments: Any) -> Any:
        """Send a request and wait for its answer.

        Raises:
            EngineTimeout: no answer in time.
            EngineGone: the engine's process died.
            VerifierError: what the engine refused, as it raised it.
        """
        return self.start(request, deadline_s=deadline_s, **arguments).result()

    def answer(self, request: str, deadline_s: float) -> Any:
        """Wait for the answer to the request under way."""
        if self._channel is None:
            raise EngineGone(f"the connection to {self._name} was closed during the request `{request}`")
        try:
            reply = self._channel.receive(deadline_s)
        except DeadlinePassed as error:
            self.close()
            raise EngineTimeout(
                f"{self._name} did not answer `{request}` within {deadline_s:g} s{last_lines(self.log_path)}"
            ) from error
        except ChannelClosed as error:
            raise self._gone(request) from error
        raise_record(reply, f"{self._name} failed in `{request}`")
        return reply["value"]

    def wait_ready(self, deadline_s: float) -> int:
        """Wait until the model is loaded; the number of engine ranks."""
        return msgspec.convert(self.ask("num_ranks", deadline_s=deadline_s), int)

    def logprobs(self, sequences: Sequence[Sequence[int]], *, deadline_s: float | None = None) -> list[list[float]]:
        """See `Engine.logprobs`."""
        rows = self.ask("logprobs", deadline_s=deadline_s, sequences=[list(item) for item in sequences])
        return msgspec.convert(rows, list[list[float]])

    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, *, deadline_s: float | None = None
    ) -> list[Generation]:
        """See `Engine.generate`."""
        rows = self.ask(
            "generate", deadline_s=deadline_s, prompts=[list(item) for item in prompts], sampling=asdict(sampling)
        )
        return msgspec.convert(rows, list[Generation])

    def state(self) -> list[list[EngineTensor]]:
        """See `Engine.state`."""
        return msgspec.convert(self.ask("state"), list[list[EngineTensor]])

    def checkpoint_view(self) -> list[list[EngineSlice]]:
        """See `Engine.checkpoint_view`."""
        return msgspec.convert(self.ask("checkpoint_view"), list[list[EngineSlice]])

    def poison(self) -> list[list[Poisoned]]:
        """See `Engine.poison`."""
        return msgspec.convert(self.ask("poison"), list[list[Poisoned]])

    def connect(self, address: Address) -> Pending:
        """See `Engine.connect`; take the `result` after the sender has accepted."""
        return self.start("connect", deadline_s=address.deadline_s + 30, address=asdict(address))

    def begin_update(self, plan: ChunkPlan) -> Pending:
        """See `Engine.begin_update`; the `result` is for `agreements`, after the sender has agreed."""
        return self.start("begin_update", plan=plan.to_json())

    def receive(self, chunk: int) -> Pending:
        """See `Engine.receive`; the `result` is for `receipts`, after the sender has sent."""
        return self.start("receive", chunk=chunk)

    def finish_update(self) -> None:
        """See `Engine.finish_update`."""
        self.ask("finish_update")

    def reset_prefix_cache(self) -> bool:
        """See `Engine.reset_prefix_cache`."""
        return msgspec.convert(self.ask("reset_prefix_cache"), bool)

    def load_adapter(self, path: Path) -> None:
        """See `Engine.load_adapter`."""
        self.ask("load_adapter", path=str(path))

    def sleep(self, level: int) -> None:
        """See `Engine.sleep`."""
        self.ask("sleep", level=level)

    def wake_up(self, tag: str) -> None:
        """See `Engine.wake_up`."""
        self.ask("wake_up", tag=tag)

    def call(self, module: str, function: str, arguments: Sequence[Any] = ()) -> list[Any]:
        """See `Engine.call`."""
        return msgspec.convert(self.ask("call", module=module, function=function, arguments=list(arguments)), list[Any])

    def call_driver(self, module: str, function: str, arguments: Sequence[Any] = ()) -> Any:
        """Run ``function(engine, *arguments)`` in the engine's own process, which asks the ranks; a JSON value."""
        return self.ask("call_driver", module=module, function=function, arguments=list(arguments))

    def close(self) -> None:
        """Close this connection; the engine stays."""
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _gone(self, request: str) -> EngineGone:
        self.close()
        return EngineGone(f"{self._name}'s process ended during the request `{request}`{last_lines(self.log_path)}")


def agreements(rows: list[dict[str, Any]]) -> list[Agreement]:
    """The answer to `begin_update`, one agreement per engine rank."""
    return msgspec.convert(rows, list[Agreement])


def receipts(rows: list[dict[str, Any]]) -> list[Receipt]:
    """The answer to `receive`, one receipt per engine rank."""
    return msgspec.convert(rows, list[Receipt])
