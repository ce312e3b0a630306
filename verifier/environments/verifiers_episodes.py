"""Episodes of the package verifiers, whose environments call a model: each call waits here for the model's turn."""

from __future__ import annotations

import asyncio
import json
import queue
import threading
import time
from collections.abc import Mapping
from functools import cache
from itertools import islice
from typing import Any

from verifier.environments.environment import Messages
from verifier.environments.verifiers_tasks import load_environment, load_package

_MODEL = "policy"


class _Episode:
    """One episode, between two calls of the model or at its end."""

    def __init__(self) -> None:
        self.events: queue.Queue[Any] = queue.Queue()
        """The messages of the next call, or the finished episode of the package."""
        self.trace: Any = None
        self.waiting: asyncio.Future[str] | None = None
        self.known: list[Mapping[str, str]] = []
        """Messages of the last call."""
        self.ended: Any = None

    def wait(self) -> Messages | None:
        """Messages of the next call; None where the episode has ended."""
        event = self.events.get()
        if isinstance(event, BaseException):
            raise ValueError(f"{type(event).__name__}: {event}") from event
        if isinstance(event, list):
            return event
        self.ended = event
        return None


class VerifiersEnvironment:
    """Environment of the rows of a source `verifiers:TASKSET`; its replies are what the package adds to the messages.

    Source:
        verifiers 0.4.0, v1/env.py `Env.run_episode`, v1/interception/server.py, v1/harness.py `Harness.launch`: "a
        harness may run its loop in-process instead of launching a program, as long as every model call goes through
        endpoint + secret".
    """

    def reset(self, row: Mapping[str, Any], seed: int) -> _Episode:
        """Begin an episode of the row's task.

        Raises:
            ValueError: the row is of another source, or the package opens the episode with other messages.
        """
        if "verifiers" not in row:
            raise ValueError("the row is of no task set: give data.source=verifiers:TASKSET")
        about = row["verifiers"]
        host = _host(about["name"], json.dumps(about["options"], sort_keys=True))
        episode = host.begin(about["task"])
        opening = episode.wait()
        if opening is None:
            raise ValueError(_first_error(episode.ended) or "the episode ends before a turn")
        if opening != list(row["messages"]):
            raise ValueError("the package opens the episode with other messages than the task's prompt")
        return episode

    def step(self, state: _Episode, messages: Messages, turn: str) -> tuple[Messages, bool]:
        """Give the turn to the call that waits, and take the messages of the next one.

        Raises:
            ValueError: the package failed, or changed what was said before.
        """
        known = [*state.known, {"role": "assistant", "content": turn}]
        _loop().call_soon_threadsafe(_settle, state.waiting, turn)
        found = state.wait()
        if found is None:
            if error := _first_error(state.ended):
                raise ValueError(error)
            return [], True
        if list(found[: len(known)]) != known:
            raise ValueError("the package changed messages that were there before the turn")
        return found[len(known) :], False


def verifiers_reward(state: _Episode) -> float:
    """Sum of the package's weighted rewards of the episode, which it ends where it goes on.

    Raises:
        ValueError: the package failed.
    """
    if state.ended is None:
        _loop().call_soon_threadsafe(_stop, state)
        if state.wait() is not None:
            raise ValueError("the environment goes on after its last turn")
    if error := _first_error(state.ended):
        raise ValueError(error)
    (trace,) = state.ended.traces
    return float(trace.reward)


def _settle(waiting: asyncio.Future[str] | None, turn: str) -> None:
    assert waiting is not None
    waiting.set_result(turn)


def _stop(state: _Episode) -> None:
    """End an episode as the package does at its own limit of turns: what was played so far is scored."""
    state.trace.stop("max_turns")
    assert state.waiting is not None
    state.waiting.set_result("")


def _first_error(ended: Any) -> str:
    found = [*ended.errors, *(error for trace in ended.traces for error in trace.errors)]
    return f"{found[0].type}: {found[0].message}" if found else ""


@cache
def _loop() -> asyncio.AbstractEventLoop:
    """Loop in a thread of its own, in which all episodes of this process run."""
    made = asyncio.new_event_loop()
    threading.Thread(target=made.run_forever, daemon=True).start()
    return made


class _Host:
    """An environment of the package and the server that its calls of the model go to."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        vf = load_package()
        from verifiers.v1.interception.server import InterceptionServer

        self._environment = load_environment(name, options)
        self._tasks: list[Any] = []
        self._rest = iter(self._environment.taskset)
        self.episodes: dict[str, _Episode] = {}
        client = _client_class()(self.episodes)

        class Server(InterceptionServer):
            def _client(self, config: Any) -> Any:
                return client

        server = Server()
        asyncio.run_coroutine_threadsafe(server.start(), _loop()).result()
        self._environment._interception = server
        self._context = vf.ModelContext(
            model=_MODEL, client=vf.EvalClientConfig(base_url="http://127.0.0.1", api_key_var="VERIFIER_NO_KEY")
        )

    def begin(self, number: int) -> _Episode:
        """Begin an episode of a task, by its number."""
        self._tasks += islice(self._rest, max(0, number + 1 - len(self._tasks)))
        episode = _Episode()

        def minted(trace: Any) -> None:
            episode.trace = trace
            self.episodes[trace.id] = episode

        async def play() -> None:
            try:
                event = await self._environment.run_episode(self._tasks[number], self._context, on_trace=minted)
            except BaseException as error:
                event = error
            self.episodes.pop(episode.trace.id if episode.trace else "", None)
            episode.events.put(event)

        asyncio.run_coroutine_threadsafe(play(), _loop())
        return episode


@cache
def _host(name: str, options: str) -> _Host:
    return _Host(name, json.loads(options))


@cache
def _client_class() -> Any:
    from verifiers.v1.clients import Client
    from verifiers.v1.clients.train import serialize_completion
    from verifiers.v1.types import AssistantMessage, Response

    class WaitingClient(Client):
        def __init__(self, episodes: Mapping[str, _Episode]) -> None:
            self._episodes = episodes

        async def get_response(
            self, dialect: Any, body: dict[str, Any], sampling: Any, session_id: str | None = None, turn: Any = None,
            headers: Any = None,
        ) -> Any:  # fmt: skip
            episode = self._episodes[session_id or ""]
            episode.known = [{"role": item["role"], "content": item["content"]} for item in body["messages"]]
            episode.waiting = asyncio.get_running_loop().create_future()
            episode.events.put(list(episode.known))
            text = await episode.waiting
            found = Response(
                id=f"{session_id}", created=int(time.time()), model=_MODEL, finish_reason="stop",
                message=AssistantMessage(content=text),
            )  # fmt: skip
            found.raw = serialize_completion(found, _MODEL)
            return found

    return WaitingClient
